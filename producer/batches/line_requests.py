"""Converts the lines of a batch into requests, and results into answers, as the gateway does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from promptq.producer.apis.completions.read import read_chat, read_completion
from promptq.producer.apis.completions.write import answer
from promptq.producer.apis.embeddings.read import read_embedding_call
from promptq.producer.apis.embeddings.write import embeddings_body
from promptq.producer.batch_store.input_file import URLS, BatchLine, RefusedLineError, request_id_of
from promptq.producer.batches.run_options import RunOptions
from promptq.producer.calls.call import CompletionCall, request_ids
from promptq.producer.calls.call_body import body_of
from promptq.producer.calls.call_to_payloads import check_pictures_served, composed, granted
from promptq.producer.calls.caller import Caller, check_model
from promptq.producer.calls.completion import completion_of
from promptq.producer.calls.errors import ApiError, as_api_error
from promptq.producer.calls.picture_urls import PicturesNeededError, with_pictures
from promptq.producer.calls.queues import ModelIsLoadingError, ServedQueue, ServedQueues
from promptq.producer.calls.rate_costs import account_of, beyond_rates, rates_of, take_of_queues
from promptq.shared.errors import InvalidRequestError, ModelNotServedError
from promptq.shared.protocol.events import Result
from promptq.shared.protocol.request import NewRequest
from promptq.shared.queue.scripts import Rate

_FETCH_SECONDS = 1.0  # meanwhile, the batch reads no results
_READERS = dict(zip(URLS, (read_chat, read_completion, read_embedding_call), strict=True))


@dataclass(slots=True)
class LineRequest:
    """A line of a batch in progress: its requests, and their results so far."""

    line: BatchLine
    request_id: str
    requests: list[NewRequest]
    rates: list[Rate]
    """The part of the line's cost that the caller's rate limits have not counted yet."""
    served: ServedQueue
    """The queue that serves the line's model."""
    results: dict[str, Result] = field(default_factory=dict)

    @property
    def open_requests(self) -> list[NewRequest]:
        return [new for new in self.requests if new.request_id not in self.results]


class LineGateway:
    """Converts lines into requests, and results into answers, as the gateway does for calls."""

    def __init__(self, batch_id: str, queues: ServedQueues, options: RunOptions) -> None:
        self._batch_id = batch_id
        self._queues = queues
        self._options = options
        self._fetching: dict[int, asyncio.Future[Mapping[str, str]]] = {}  # by line
        self._is_closed = False

    async def of(self, line: BatchLine) -> LineRequest | None:
        """Converts a line into requests. Returns None while no worker has loaded the line's model,
        and while the line's pictures are being fetched. After None, call `of` again later.
        Raises RefusedLineError if the gateway would refuse the line."""
        options, request_id = self._options, request_id_of(self._batch_id, line)
        aliases = await self._queues.aliases()
        with _refusing(line, request_id):
            call = _call_of(line)
            call = call.with_fields(**_with_defaults(call, options)).with_model_of(aliases)
            caller, rates, account = options.caller, list[Rate](), None
            first, *_ = request_ids(request_id, call.num_choices)
            if caller is not None and call.model:
                check_model(caller, call.model)
            try:
                served, view = await self._queues.of_model(
                    call.model, lambda view: view.request(first)
                )
            except ModelIsLoadingError:
                return None
            if caller is not None:
                check_model(caller, call.model or view.model)
                call = granted(call, caller)
                account = account_of(caller, _holder(caller))
            if (fetched := await self._pictures(line, call)) is None:
                return None
            call = with_pictures(call, fetched)
            # The request's id identifies a repeated line, so no key is needed. The run enqueues
            # lost requests again, so it need not wait for replicas.
            requests = call.with_fields(idempotency_key=None, durability=None).requests(request_id)
            new = [self._in_the_window(each) for each in composed(call, requests, account)]
            if pictures := new[0].request.pictures:
                check_pictures_served(view, call.names)
            if caller is not None:
                rates = rates_of(caller, call.requests(request_id), pictures)
        return LineRequest(line, request_id, new, rates, served)

    async def wait_for_rates(self, item: LineRequest) -> float:
        """Returns the seconds until the caller's rate limits have room for the line.

        If there is room now, counts the line's cost and returns 0. As at OpenAI, an API key has
        separate limits for its calls and for its batches. Raises RefusedLineError.
        """
        caller = self._options.caller
        if caller is None or not item.rates:
            return 0.0
        own, holder = self._queues.own.queue, _holder(caller)
        reply = await take_of_queues(own, item.served.queue, holder, item.rates)
        if reply.wait_ms is None:
            with _refusing(item.line, item.request_id):
                raise beyond_rates(caller, item.rates)
        if reply.wait_ms == 0:
            item.rates = []
        return reply.wait_ms / 1000

    async def answer(self, item: LineRequest) -> dict[str, Any]:
        """Returns the body of the line's answer. Raises RefusedLineError if a request failed."""
        view = await item.served.view()
        call = _call_of(item.line).with_model_of(await self._queues.aliases())
        call = call.with_fields(priority=item.requests[0].request.priority)
        completion = completion_of(call, item.request_id, view.model)
        style = view.output_style
        results = [item.results[new.request_id] for new in item.requests]
        with _refusing(item.line, item.request_id):
            if call.encoding_format is not None:
                return embeddings_body(completion, results)
            return await item.served.client.turns.run(answer(completion, results, style))

    def too_large(self, item: LineRequest, limit: str) -> RefusedLineError:
        """Returns the error for a line that alone exceeds a limit of the queue."""
        message = f"this line alone exceeds the queue's limit {limit}"
        refusal = ApiError(429, message, code="queue_full")
        return RefusedLineError(item.line, item.request_id, refusal.status, refusal.body)

    def close(self) -> None:
        """Stops fetching pictures. `of` then returns None for a line that needs pictures."""
        self._is_closed = True
        for fetching in self._fetching.values():
            fetching.cancel()

    async def has_fetched(self) -> bool:
        """Waits up to `_FETCH_SECONDS` until the pictures of any line are fetched, or have failed.
        Returns False if none were, or if no pictures are being fetched."""
        fetching = [each for each in self._fetching.values() if not each.done()]
        if not fetching:
            return False
        first = asyncio.FIRST_COMPLETED
        done, _ = await asyncio.wait(fetching, timeout=_FETCH_SECONDS, return_when=first)
        return bool(done)

    async def _pictures(self, line: BatchLine, call: CompletionCall) -> Mapping[str, str] | None:
        """Maps the URLs of the line's pictures to data URLs; None while these are being fetched."""
        try:
            with_pictures(call, {})
            return {}
        except PicturesNeededError as needed:
            if self._options.fetch is None:
                raise
            if self._is_closed:
                return None
            fetching = self._fetching.get(line.number)
            if fetching is None:
                fetching = asyncio.ensure_future(self._options.fetch(needed.urls, needed.field))
                self._fetching[line.number] = fetching
        if not fetching.done():
            return None
        return self._fetching.pop(line.number).result()

    def _in_the_window(self, new: NewRequest) -> NewRequest:
        """Limits the request's deadline to the end of the batch."""
        if self._options.expires_at is None:
            return new
        left = max(1, int((self._options.expires_at - time.time()) * 1000))
        deadline_ms = min(new.request.deadline_ms or left, left)
        request = new.request.model_copy(update={"deadline_ms": deadline_ms})
        return replace(new, request=request)


def _with_defaults(call: CompletionCall, options: RunOptions) -> dict[str, Any]:
    fields = {**options.defaults, **call.fields}
    if "service_tier" in call.fields and "priority" not in call.fields:
        fields.pop("priority", None)
    return fields


def _holder(caller: Caller) -> str:
    return f"{caller.name}:batches"


def _call_of(line: BatchLine) -> CompletionCall:
    call = _READERS[line.url](body_of(json.dumps(line.body).encode()), {})
    if call.stream:
        raise InvalidRequestError("stream: a batch does not stream", field="stream")
    if "deadline_policy" in call.fields:
        message = "deadline_policy: a batch does not refuse lines that would be late"
        raise InvalidRequestError(message, field="deadline_policy")
    return call


@contextmanager
def _refusing(line: BatchLine, request_id: str) -> Iterator[None]:
    try:
        yield
    except (InvalidRequestError, ModelNotServedError) as error:
        refusal = as_api_error(error)
    except ApiError as error:
        refusal = error
    else:
        return
    raise RefusedLineError(line, request_id, refusal.status, refusal.body)
