"""Makes rows of the engine's output: text, stop strings, vectors, ends."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.events import (
    ErrorInfo,
    Result,
    TokenEvent,
    TokenLogprob,
    TopLogprob,
    Usage,
    prompt_json,
)
from promptq.shared.protocol.request import Embed, FinishReason
from promptq.shared.protocol.rows import Row
from promptq.shared.runtime.logs import get_logger
from promptq.worker.engine.api.messages import PromptLogprobs, SequenceOutput
from promptq.worker.leases.lease import Lease
from promptq.worker.leases.leases import Leases
from promptq.worker.leases.prepared_request import PreparedRequest
from promptq.worker.text.detokenizer import REPLACEMENT
from promptq.worker.text.tokenizer import Tokenizer

_SHORTEST = 1e-12
"""A vector that is shorter is not made longer, as in torch's `normalize`."""


class RowBuilder:
    """Makes rows, and marks a request as ending with its last one. `tokenizer` gives the text of
    tokens in log-probabilities."""

    def __init__(self, leases: Leases, tokenizer: Tokenizer) -> None:
        self._leases = leases
        self._tokenizer = tokenizer
        self._log = get_logger()

    def row(self, lease: Lease, output: SequenceOutput) -> Row:
        """The row of a running request. If making it fails, a row that ends this request alone.

        None of the tokens that the failed row would have had are sent then.
        """
        prepared = lease.prepared
        try:
            row = self._row(prepared, output)
        except Exception as error:  # it must not stop the other requests
            self._log.exception("a request's output failed", request_id=lease.request_id)
            reason = ErrorInfo(type="internal_error", message=f"its output failed: {error}")
            row = prepared.next_row([], "", finish_reason=FinishReason.ERROR, error=reason)
        if row.finish_reason:
            self._leases.ending(lease, by_engine=output.finish_reason is not None)
        return row

    def refusal(self, lease: Lease, error: InvalidRequestError) -> Row:
        """The last row of a request that never became a sequence."""
        claim = lease.claim
        event = TokenEvent(
            index=claim.num_logged,
            token_ids=[],
            text="",
            finish_reason=FinishReason.ERROR,
            attempt=claim.attempt,
            usage=Usage(completion_tokens=claim.num_logged),
            error=ErrorInfo(type=error.error_type, message=str(error), code=error.code),
        )
        result = Result.fold([*claim.events, event]).to_json()
        self._log.debug("refused", request_id=claim.request_id, error=str(error))
        return Row.of(claim.request_id, claim.fence, event, result)

    def completion(self, lease: Lease) -> Row:
        """The last row of a request that needs no engine: earlier attempts generated all of its
        output, or it asks for its tokens."""
        prepared = lease.prepared
        if prepared.request.tokenize:
            token_ids = prepared.engine_request.prompt_token_ids
            prepared.prompt_json = prompt_json(
                prompt_texts(self._tokenizer, token_ids), token_ids=token_ids
            )
            return prepared.next_row([], "", finish_reason=FinishReason.STOP)
        reason = FinishReason.STOP if prepared.is_stopped else FinishReason.LENGTH
        return prepared.next_row([], prepared.text.flush(), finish_reason=reason)

    def _row(self, prepared: PreparedRequest, output: SequenceOutput) -> Row:
        text, token_ids, reason, stream = "", [], output.finish_reason, prepared.text
        if reason is FinishReason.ERROR:
            error = self._error_of(prepared, output)
            return prepared.next_row([], stream.flush(), finish_reason=reason, error=error)
        if output.embedding is not None:
            vector = encoded(output.embedding, prepared.request.embed or Embed())
            return prepared.next_row([], "", finish_reason=reason, embedding=vector)
        for token_id in output.token_ids:
            token_ids.append(token_id)
            is_last = reason is FinishReason.STOP and len(token_ids) == len(output.token_ids)
            if not (
                is_last and token_id in prepared.engine_request.end_token_ids
            ):  # an end token is not text
                text += stream.push(token_id)
            if stream.stopped:
                break
        if stream.stopped:
            reason = FinishReason.STOP
        elif reason is not None:
            text += stream.flush()
        logprobs = output.logprobs[: len(token_ids)] if output.logprobs is not None else None
        self._name_tokens(logprobs or ())
        if output.prompt_logprobs is not None:
            prepared.prompt_json = self._prompt_json(prepared, output.prompt_logprobs)
        return prepared.next_row(token_ids, text, logprobs, reason)

    def _error_of(self, prepared: PreparedRequest, output: SequenceOutput) -> ErrorInfo:
        reason = output.error or "the engine failed it"
        if output.is_refused:
            field = prepared.request.field_that_bounds
            return ErrorInfo(type="unsupported", message=f"{field}: {reason}")
        self._log.error("the engine failed", request_id=prepared.request_id, error=output.error)
        return ErrorInfo(type="internal_error", message=reason)

    def _prompt_json(self, prepared: PreparedRequest, pieces: list[PromptLogprobs]) -> str:
        token_ids = prepared.engine_request.prompt_token_ids
        logprobs = list(_prompt_logprobs(token_ids, pieces))
        self._name_tokens(logprobs)
        return prompt_json(prompt_texts(self._tokenizer, token_ids), [None, *logprobs])

    def _name_tokens(self, logprobs: Sequence[TokenLogprob]) -> None:
        for chosen in logprobs:
            chosen.token = self._tokenizer.token_text(chosen.token_id)
            for other in chosen.top or ():
                other.token = self._tokenizer.token_text(other.token_id)


def _prompt_logprobs(
    token_ids: Sequence[int], pieces: Sequence[PromptLogprobs]
) -> Iterator[TokenLogprob]:
    """The report of each token of a prompt but the first one."""
    following = iter(token_ids[1:])
    for piece in pieces:
        columns = (piece.logprobs, piece.ranks, piece.top_ids, piece.top_logprobs)
        for logprob, rank, top_ids, top in zip(*(it.tolist() for it in columns), strict=True):
            likeliest = [
                TopLogprob(token_id=token_id, logprob=each)
                for token_id, each in zip(top_ids, top, strict=True)
            ]
            yield TokenLogprob(
                token_id=next(following), logprob=logprob, rank=rank, top=likeliest or None
            )


def prompt_texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """The text of each token of a prompt, special tokens by their names. Together they are the
    prompt: a character of several tokens is in the text of the last one."""
    texts = [tokenizer.token_text(token_id) for token_id in token_ids]
    for is_part, run in groupby(range(len(texts)), lambda place: REPLACEMENT in texts[place]):
        if is_part:
            places = [*run]
            whole = tokenizer.decode([token_ids[place] for place in places])
            for place in places:
                texts[place] = ""
            texts[places[-1]] = whole
    return texts


def encoded(vector: npt.NDArray[np.float32], asked: Embed) -> str:
    """Base64 of little-endian float32: the first `dimensions` numbers, at length 1 if asked for."""
    numbers = vector[: asked.dimensions].astype(np.float64)
    if asked.normalize:
        numbers /= max(float(np.linalg.norm(numbers)), _SHORTEST)
    return base64.b64encode(numbers.astype("<f4").tobytes()).decode("ascii")
