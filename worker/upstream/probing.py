"""Finds out a server's abilities by their effect on tokens: many servers ignore unknown fields."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.upstream.dialects.dialect import Dialect, Mask, ServerDescription
from promptq.worker.upstream.dialects.transport import (
    RefusedError,
    Server,
    ServerFaultError,
    malformed_as_fault,
)

_REQUEST = EngineRequest(0, [0], SamplingParams(temperature=0.0), seed=0, max_tokens=1)
_GRAMMAR = """%llguidance {{}}
start: <[{token_id}]> more?
more: %json {{"type": "integer", "x-guidance": {{"whitespace_pattern": "[ ]"}}}}"""
"""A grammar whose outputs begin with one token. The rest shows whether the server reads our form of
schemas."""
_LEAST_VOCABULARY = 256
_LARGEST_TOKEN_ID = 2**24


async def describe(dialect: Dialect, server: Server) -> ServerDescription:
    """Returns a server's description, with its probed abilities. Raises the errors of
    `Dialect.describe`."""
    description = await dialect.describe(server)
    preferred = await _token(dialect, server, description.model)
    other = 65 if preferred != 65 else 66
    return replace(
        description,
        takes_grammars=await _takes_grammars(dialect, server, description.model, other),
        reports_prompts=await _reports_prompts(dialect, server, description.model),
        # The last one, because it notices if another one has ended the server.
        heeds_masks=await _heeds_masks(dialect, server, description.model, preferred, other),
    )


async def _reports_prompts(dialect: Dialect, server: Server, model: str) -> bool:
    """Returns whether an answer has log-probabilities of the prompt."""
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    request = replace(_REQUEST, prompt_token_ids=[0, 0], params=params)
    try:
        with malformed_as_fault():
            report = await dialect.prompt_logprobs(server, request, model)
    except (RefusedError, ServerFaultError) as error:
        if isinstance(error, RefusedError) and error.is_servers:
            raise
        return False
    return report is not None and len(report) == 1


async def _heeds_masks(
    dialect: Dialect, server: Server, model: str, preferred: int, other: int
) -> bool:
    """Returns whether a mask without the token that the server prefers makes it choose another
    one."""
    allowed = np.zeros(max(_LEAST_VOCABULARY, preferred + 1), bool)
    allowed[other] = True
    try:
        chosen = await _token(dialect, server, model, mask=Mask(allowed, (preferred,)))
    except RefusedError as error:
        if error.is_servers:
            raise
        return False
    return chosen != preferred


async def _takes_grammars(dialect: Dialect, server: Server, model: str, other: int) -> bool:
    """Returns whether a grammar makes the server choose a token that it does not prefer."""
    try:
        grammar = _GRAMMAR.format(token_id=other)
        return await _token(dialect, server, model, grammar=grammar) == other
    except (RefusedError, ServerFaultError) as error:
        if isinstance(error, RefusedError) and error.is_servers:
            raise
        return False  # an engine that reads other grammars breaks off


async def _token(dialect: Dialect, server: Server, model: str, **rules: Any) -> int:
    try:
        async with (
            asyncio.timeout(server.idle_seconds),
            aclosing(dialect.generate(server, _REQUEST, [], model, **rules)) as chunks,
        ):
            async for chunk in chunks:
                for token_id in chunk.token_ids:
                    if not 0 <= token_id <= _LARGEST_TOKEN_ID:
                        raise ServerFaultError(f"{token_id!r:.40} is no token id")
                    return token_id
    except TimeoutError:
        pass
    raise ServerFaultError("generated nothing when it was tried")
