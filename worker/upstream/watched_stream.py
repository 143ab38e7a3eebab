"""A server's stream in which each token obeys the request's rules.

A server that takes grammars gets the request's grammar in each call, or only in an output's first
call if the server cannot resume grammars. In calls without the grammar, the server generates
freely. The first token that breaks a rule is dropped, and the call is closed. Then the server
chooses one token under a mask, and another call continues. So, on any server that heeds masks,
greedy outputs are the same as from an engine that masks each token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import numpy as np
import numpy.typing as npt

from promptq.shared.protocol.request import FinishReason
from promptq.worker.engine.api.messages import EngineRequest, PromptLogprobs
from promptq.worker.upstream.call_request import CallRequest
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
    SilentServerError,
    UnusableAnswerError,
    malformed_as_fault,
)
from promptq.worker.upstream.token_rules import NoTokenError, TokenRules

_MOST_REJECTED = 64
"""The most forbidden tokens that a server may choose at one position. Each token costs a call."""


class WatchedStream:
    """One attempt at a request on a server. Checks all tokens that the server returns."""

    def __init__(
        self,
        dialect: Dialect,
        server: Server,
        request: EngineRequest,
        emitted: Sequence[int],
        description: ServerDescription,
        vocab_size: int,
    ) -> None:
        """Prepares a stream after the tokens `emitted`, which the grammar has accepted."""
        self._dialect, self._server, self._model = dialect, server, description.model
        self._request = request
        self._output = [*emitted]
        self._vocab_size = vocab_size
        self._rules = TokenRules(request, emitted, vocab_size)
        self._call = CallRequest(dialect.abilities, request, description.keeps_seeds)
        self._num_before_call = len(emitted)
        self._rejected: list[int] = []
        """The tokens that broke a rule last. The next choice under a mask forbids them."""
        self._breaks_rule = self._is_refused = self._is_over = self._needs_call = False
        self._names_ends = "ignore_eos" not in dialect.abilities.unheeded
        """Whether the server returns an end token at each end. If the request ignores this token,
        another call continues."""
        self._takes_grammars = description.takes_grammars
        self._resumes_grammars = description.resumes_grammars

    async def chunks(self) -> AsyncGenerator[Chunk]:
        """Yields checked chunks until the end, as `Dialect.generate` does. Raises NoTokenError, and
        UnusableAnswerError for an answer without an allowed token."""
        while not self._is_over:
            mask = self._rules.mask()
            is_forced = np.count_nonzero(mask) == 1 and self._request.params.logprobs is None
            if is_forced and (self._output or self._source() is None):
                chunk = Chunk([int(mask.argmax())])
            else:
                async with aclosing(self._free_chunks()) as free:
                    async for chunk in free:
                        yield chunk
                if self._is_refused or self._needs_call:
                    continue
                if not self._breaks_rule:
                    return
                chunk = await self._choose()
            if not self._take(chunk):
                raise UnusableAnswerError("a token outside of the mask")
            yield chunk

    async def prompt_logprobs(self) -> PromptLogprobs:
        """Returns checked log-probabilities of the prompt's tokens from the second token on. Raises
        UnusableAnswerError."""
        with malformed_as_fault():
            found = await self._dialect.prompt_logprobs(self._server, self._request, self._model)
        if found is None or len(found) != len(self._request.prompt_token_ids) - 1:
            raise UnusableAnswerError("log-probabilities of the prompt are missing")
        if not (np.isfinite(found.logprobs).all() and np.isfinite(found.top_logprobs).all()):
            raise UnusableAnswerError("a log-probability of the prompt is not finite")
        if not ((found.top_ids >= 0) & (found.top_ids < self._vocab_size)).all():
            raise UnusableAnswerError("its report on the prompt has a number that is no token id")
        return found

    async def embedding(self, size: int) -> tuple[npt.NDArray[np.float32], int | None]:
        """Checks and returns the prompt's vector [size], or the pair's score [1], and the number of
        prompt tokens (None if it is not reported). Raises UnusableAnswerError."""
        of = (self._server, self._request, self._model)
        with malformed_as_fault():
            vector, num_tokens = await self._dialect.embedding(*of)
        size = size if self._request.pair is None else 1
        if type(num_tokens or 0) is not int:
            raise UnusableAnswerError("its number of prompt tokens is no number")
        if len(vector) != size or not np.isfinite(vector).all():
            raise UnusableAnswerError(f"no vector of {size} finite numbers")
        return vector, num_tokens

    async def _free_chunks(self) -> AsyncGenerator[Chunk]:
        """Yields the chunks that the server generates freely, up to a token that breaks a rule."""
        self._breaks_rule = self._is_refused = self._needs_call = False
        self._num_before_call = len(self._output)
        async with aclosing(self._without_refusal()) as chunks:
            async for chunk in chunks:
                if self._is_over and chunk.token_ids:
                    return  # the server continues although nobody waits
                if self._is_over:
                    continue  # until the server's own end
                is_servers = chunk.finish_reason is not None
                self._breaks_rule = not self._take(chunk)
                if chunk.token_ids or not self._breaks_rule:
                    yield chunk
                if self._breaks_rule or self._needs_call:
                    return
                if not is_servers and chunk.finish_reason is FinishReason.STOP:
                    return  # the server does not know this end

    async def _without_refusal(self) -> AsyncGenerator[Chunk]:
        """Yields the server's chunks; no chunk if the server refuses the grammar, for example
        because its llguidance is older."""
        source, before = self._source(), len(self._output)
        try:
            async with aclosing(self._generate(None, source)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except (RefusedError, ServerFaultError) as error:
            self._is_refused = source is not None and len(self._output) == before
            if not self._is_refused or isinstance(error, SilentServerError):
                raise
            self._takes_grammars = False

    def _source(self) -> str | None:
        """Returns the grammar for a call that continues the output; None if it has no grammar."""
        if self._request.grammar is None or not self._takes_grammars:
            return None
        return self._request.grammar.source if self._resumes_grammars or not self._output else None

    def _take(self, chunk: Chunk) -> bool:
        """Accept a chunk's tokens, and cut the chunk where the output ends or a token breaks a
        rule.

        Returns whether all tokens obey the rules.
        """
        self._needs_call = self._call.cut_rejected(chunk)
        reason, chunk.finish_reason = chunk.finish_reason, None
        for number, token_id in enumerate(chunk.token_ids):
            if not self._rules.allow(token_id):
                self._rejected = [token_id]
                chunk.cut(number)
                return False
            self._rules.accept(token_id)
            self._output.append(token_id)
            is_end = token_id in self._request.end_token_ids or self._rules.is_complete
            if is_end or len(self._output) >= self._request.max_tokens:
                chunk.cut(number + 1)
                reason = FinishReason.STOP if is_end else FinishReason.LENGTH
                break
            if self._call.is_miscounted_after(token_id):
                self._needs_call, reason = True, None
                chunk.cut(number + 1)
                break
        else:
            if reason is FinishReason.STOP and self._names_ends:  # the request ignores it
                if len(self._output) == self._num_before_call:
                    raise UnusableAnswerError("the server ended without its end token")
                self._needs_call, reason = True, None
            elif reason is FinishReason.STOP and not self._rules.may_end:
                self._rejected = sorted(self._request.end_token_ids)
                return False
        chunk.finish_reason = reason
        self._is_over = reason is not None
        return True

    async def _choose(self) -> Chunk:
        """Returns an allowed next token. Asks the server, unless only one token is allowed."""
        mask, rejected = self._rules.mask(), [*self._rejected]
        if np.count_nonzero(mask) == 1 and self._request.params.logprobs is None:
            return Chunk([int(mask.argmax())])
        while len(rejected) < _MOST_REJECTED:
            rules = Mask(mask, tuple(rejected), may_be_grammar=self._takes_grammars)
            try:
                chunk = await self._first_chunk(rules)
            except (RefusedError, ServerFaultError) as error:
                biases = self._call.after(self._output).params.logit_bias
                is_grammar = rules.is_grammar_beside(biases)
                if not is_grammar or isinstance(error, SilentServerError):
                    raise
                self._takes_grammars = False
                continue
            if not chunk.token_ids:
                is_end = chunk.finish_reason is FinishReason.STOP and not self._names_ends
                if is_end and self._rules.may_end:
                    return chunk
                raise UnusableAnswerError("the server chose no token under a mask")
            chunk.cut(1)
            (token_id,), chunk.finish_reason = chunk.token_ids, None
            if mask[token_id]:
                return chunk
            if token_id in rejected:
                raise UnusableAnswerError("the server chose tokens outside of the mask")
            rejected.append(token_id)
        raise NoTokenError(
            f"the model chose {_MOST_REJECTED} tokens in one place that the request's limits"
            " forbid, and the server cannot take them all at once"
        )

    async def _first_chunk(self, mask: Mask) -> Chunk:
        async with aclosing(self._generate(mask)) as chunks:
            async for chunk in chunks:
                return chunk
        raise ServerFaultError("the stream ended without a finish reason")

    async def _generate(
        self, mask: Mask | None, grammar: str | None = None
    ) -> AsyncGenerator[Chunk]:
        """Yields the server's chunks after a check: nothing unchecked may reach a log."""
        request = self._call.after(self._output, mask)
        wanted = Continuation(request, tuple(self._output), self._model, mask, grammar)
        chunks = self._dialect.generate(self._server, wanted)
        with malformed_as_fault():
            async with aclosing(chunks):
                while (chunk := await self._next(chunks)) is not None:
                    for token_id in chunk.token_ids:
                        if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
                            raise UnusableAnswerError(f"{token_id!r:.40} is no token id")
                    if type(chunk.num_prompt_tokens or 0) is not int:
                        raise UnusableAnswerError("its number of prompt tokens is no number")
                    if chunk.logprobs is not None and len(chunk.logprobs) != len(chunk.token_ids):
                        raise UnusableAnswerError("a log-probability is missing")
                    yield chunk

    async def _next(self, chunks: AsyncGenerator[Chunk]) -> Chunk | None:
        """Returns the next chunk with tokens or a finish reason; None after the end of the stream.

        Events without tokens do not extend the time limit: some servers send such events for ever.
        """
        try:
            async with asyncio.timeout(self._server.idle_seconds):
                async for chunk in chunks:
                    if chunk.token_ids or chunk.finish_reason is not None:
                        return chunk
        except TimeoutError:
            raise SilentServerError(f"{self._server.url} sent no token for too long") from None
        return None
