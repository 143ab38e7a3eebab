"""Any server with OpenAI's `/v1/completions`, such as a cloud's API, which takes and returns text.

The worker's tokenizer computes the token ids of each piece of a stream. The server's token ids may
differ, so no other attempt continues a stream exactly.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from promptq.shared.errors import ConfigurationError, InvalidRequestError
from promptq.shared.protocol.request import FinishReason
from promptq.worker.text.tokenizer import HuggingFaceTokenizer
from promptq.worker.upstream.dialects.dialect import Chunk, Continuation, ServerDescription
from promptq.worker.upstream.dialects.openai_completions import (
    COMPLETIONS,
    OpenAIDialect,
    choice_of,
    event_of,
    sampling_of,
)
from promptq.worker.upstream.dialects.transport import (
    RefusedError,
    Server,
    ServerFaultError,
    UnusableAnswerError,
)


class OpenAIRemoteDialect(OpenAIDialect):
    """Sends prompts as text. `model` is the server's name for the model, needed if the server has
    several models. `max_model_len` is the length of a context in tokens; None if the server reports
    this length."""

    unheeded = OpenAIDialect.unheeded | {
        "frequency_penalty",  # a later call would not count the tokens of earlier ones
        "logit_bias",
        "presence_penalty",
        "stop_token_ids",
    }

    def __init__(self, *, model: str, max_model_len: int | None, **_: object) -> None:
        super().__init__()
        self._model, self._max_model_len = model, max_model_len

    def use(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decode = tokenizer.decoder(["".join(tokenizer.special_tokens)])
        self._begin = tokenizer.encode_text("", add_special_tokens=True)

    async def describe(self, server: Server) -> ServerDescription:
        try:
            cards = {str(card["id"]): card for card in (await server.get("/v1/models"))["data"]}
            name = next(iter(cards)) if len(cards) == 1 else self._model
            known = cards.get(name, {})
            longest = known.get("max_model_len") or known.get("context_length") or 0
            probe = {"model": name, "prompt": "1", "max_tokens": 1}
            (choice,) = (await server.post(COMPLETIONS, probe))["choices"]
            if not isinstance(choice["text"], str):
                raise TypeError("the completion has no text")
        except (RefusedError, KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"--upstream: {server.url} does not complete a text with the model"
                f" {self._model!r:.200} ({error!s:.500}); its name there is --served-model-name,"
                " otherwise --model"
            ) from error
        if not (longest := self._max_model_len or int(longest)):
            raise ConfigurationError(
                f"--max-model-len: {server.url} does not say how long a context {name!r:.200}"
                " takes, so give this"
            )
        return ServerDescription("an OpenAI server", name, longest, gives_token_ids=False)

    async def generate(self, server: Server, wanted: Continuation) -> AsyncGenerator[Chunk]:
        """Yields the server's tokens. No request has a mask or a grammar."""
        prompt, begin, left = wanted.prompt, self._begin, wanted.num_left
        if begin and wanted.request.prompt_token_ids[: len(begin)] == begin:
            prompt = prompt[len(begin) :]  # the server adds these tokens, too
        text = self._decode(prompt)
        body = {"model": wanted.model, "prompt": text, **sampling_of(wanted.request, left)}
        async with server.stream(COMPLETIONS, body) as events:
            async for data in events:
                choice, reason = choice_of(event_of(data))
                chunk = Chunk(self._encode(choice.get("text") or ""), finish_reason=reason)
                if len(chunk.token_ids) >= left and reason is not FinishReason.STOP:
                    chunk.finish_reason = FinishReason.LENGTH
                chunk.cut(left)
                left -= len(chunk.token_ids)
                if chunk.token_ids or chunk.finish_reason:
                    yield chunk
                if chunk.finish_reason:
                    return

    def _encode(self, text: object) -> list[int]:
        if not isinstance(text, str):
            raise ServerFaultError(f"sent {text!r:.40} as text")
        try:
            return self._tokenizer.encode_output(text) if text else []
        except InvalidRequestError as error:
            raise UnusableAnswerError(f"text that has no tokens: {error}") from error
