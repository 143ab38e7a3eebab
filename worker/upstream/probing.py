"""Finds out a server's abilities by their effect on tokens: many servers ignore unknown fields."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.upstream.dialects.dialect import (
    Chunk,
    Continuation,
    Dialect,
    Mask,
    ServerDescription,
)
from promptq.worker.upstream.dialects.transport import (
    RefusedError,
    Server,
    ServerFaultError,
    malformed_as_fault,
)

_REQUEST = EngineRequest(0, [0], SamplingParams(temperature=0.0), seed=0, max_tokens=1)
_GRAMMAR = """%llguidance {{}}
start: <[{first}]> <[{second}]> more?
more: %json {{"type": "integer", "x-guidance": {{"whitespace_pattern": "[ ]"}}}}"""
"""A grammar that begins with two fixed tokens. Its schema is in a form that a server may refuse."""
_SECOND = 67
_HALF = 4
_LEAST_VOCABULARY = 256
_LARGEST_TOKEN_ID = 2**24

_Tokens = tuple[list[int], list[float]]


async def describe(dialect: Dialect, server: Server) -> ServerDescription:
    """Returns a server's description with its probed abilities, and raises the same errors as
    `Dialect.describe`. Generates some tokens on the server."""
    description, is_invariant = await dialect.describe(server), False
    if description.pools or not description.gives_token_ids:
        return description

    async def choice(*emitted: int, **rules: Any) -> int:
        request = replace(_REQUEST, max_tokens=1 + len(emitted))
        return (await output(request, *emitted, **rules))[0][0]

    async def output(request: EngineRequest, *emitted: int, **rules: Any) -> _Tokens:
        wanted = Continuation(request, emitted, description.model, **rules)
        stream = dialect.generate(server, wanted)
        return await _tokens(server, stream, request.max_tokens - len(emitted))

    async def heeds_grammar(*output: int) -> bool:
        *emitted, expected = output
        return await choice(*emitted, grammar=grammar) == expected

    async def reports_prompts() -> bool:
        params = SamplingParams(temperature=0.0, prompt_logprobs=0)
        request = replace(_REQUEST, prompt_token_ids=[0, 0], params=params)
        with malformed_as_fault():
            report = await dialect.prompt_logprobs(server, request, description.model)
        return report is not None and len(report) == 1

    async def heeds_masks() -> bool:
        allowed = np.zeros(max(_LEAST_VOCABULARY, preferred + 1), bool)
        allowed[other] = True
        return await choice(mask=Mask(allowed, (preferred,))) != preferred

    async def keeps_seeds() -> bool:
        """Whether the server generates the second half of a sampled output again, while it also
        generates another output."""
        nonlocal is_invariant
        reports = dialect.abilities.logprobs
        logprobs = 0 if reports else None
        params = SamplingParams(temperature=2.0, logprobs=logprobs)
        request = replace(_REQUEST, params=params, seed=1, max_tokens=2 * _HALF)
        ids, reported = await output(request)
        emitted, requests = ids[:_HALF], (request, replace(request, seed=2))
        again, other = await asyncio.gather(*(output(each, *emitted) for each in requests))
        is_shown = again[0] == ids[_HALF:] != other[0]
        is_stated = description.is_invariant or os.environ.get("VLLM_BATCH_INVARIANT") == "1"
        is_reported = bool(reported) is reports and again[1] == reported[_HALF:]
        is_invariant = is_stated and is_shown and is_reported
        return is_shown

    preferred = await choice()
    other = 65 if preferred != 65 else 66
    grammar = _GRAMMAR.format(first=other, second=_SECOND)
    takes_grammars = await _is_shown(heeds_grammar(other))
    keeps = await _is_shown(keeps_seeds())
    return replace(
        description,
        takes_grammars=takes_grammars,
        resumes_grammars=takes_grammars and await _is_shown(heeds_grammar(other, _SECOND)),
        keeps_seeds=keeps,
        is_invariant=is_invariant,
        reports_prompts=await _is_shown(reports_prompts()),
        # The last probe, because it notices if an earlier probe has ended the server.
        heeds_masks=await _is_shown(heeds_masks(), may_break_off=False),
    )


async def _is_shown(probe: Awaitable[bool], *, may_break_off: bool = True) -> bool:
    """Returns a probe's result; False if the server refuses the call, or if it breaks off and
    `may_break_off` is True."""
    try:
        return await probe
    except (RefusedError, ServerFaultError) as error:
        if error.is_servers if isinstance(error, RefusedError) else not may_break_off:
            raise
        return False


async def _tokens(server: Server, generated: AsyncGenerator[Chunk], number: int) -> _Tokens:
    """Returns a stream's first `number` tokens and their log-probabilities. Ends the stream."""
    ids, logprobs = list[int](), list[float]()
    try:
        async with asyncio.timeout(server.idle_seconds), aclosing(generated) as chunks:
            async for chunk in chunks:
                ids += chunk.token_ids
                logprobs += [entry.logprob for entry in chunk.logprobs or ()]
                if len(ids) >= number or chunk.finish_reason is not None:
                    break
    except TimeoutError:
        pass
    if not ids:
        raise ServerFaultError("generated nothing when it was tried")
    for token_id in ids:
        if not 0 <= token_id <= _LARGEST_TOKEN_ID:
            raise ServerFaultError(f"{token_id!r:.40} is no token id")
    return ids[:number], logprobs[:number]
