"""Pictures for vLLM's server. A prompt has one token for each picture. The server adds the other
tokens of the picture."""

from __future__ import annotations

import hashlib
from typing import Any

from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.upstream.dialects.transport import (
    RefusedError,
    Server,
    ServerFaultError,
    SilentServerError,
)

GENERATE = "/inference/v1/generate"
_CHATS = "/v1/chat/completions"
_PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAAAAACPAi4CAAAAG0lEQVR42u3BgQAAAADDoPlT3"
    "+AEVQEAAAB8AxBAAAG9PLePAAAAAElFTkSuQmCC"
)
"""A PNG of 64 times 64 pixels."""
_NO_PLACE = "prompt replacement"
"""A part of vLLM's error message for a picture that has no place in the prompt."""


def picture_fields(request: EngineRequest, salt: dict[str, str]) -> dict[str, Any]:
    """Returns the fields of a call for a request's pictures.

    The server's caches identify a picture by its `uuid`, a hash of the picture and the `salt`. The
    salt keeps the pictures of tenants apart.
    """
    if not request.pictures:
        return {}
    key = hashlib.sha256(salt.get("cache_salt", "").encode()).digest()
    return {
        "content_parts": [
            {
                "type": "image_url",
                "url": url,
                "uuid": hashlib.sha256(key + url.encode()).hexdigest(),
            }
            for url in request.pictures
        ],
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


async def takes_pictures(server: Server, call: dict[str, Any]) -> bool:
    """Returns whether a server reads pictures: a picture adds tokens to a chat, and the server
    refuses `call` with a picture, because the call's token ids have no place for the picture. A
    server that ignores pictures would not refuse it. Raises SilentServerError."""
    part = {"type": "image_url", "image_url": {"url": _PICTURE}}

    async def num_tokens(*parts: dict[str, Any]) -> int:
        chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, *parts]}]
        body = {"model": call["model"], "messages": chat, "max_tokens": 1}
        answer = await server.post(_CHATS, body, server.idle_seconds)
        number: int = answer["usage"]["prompt_tokens"]
        return number

    try:
        if await num_tokens(part) <= await num_tokens():
            return False
        await server.post(GENERATE, {**call, "content_parts": [{**part, "url": _PICTURE}]})
    except SilentServerError:
        raise
    except (RefusedError, ServerFaultError) as error:
        return _NO_PLACE in str(error)
    return False
