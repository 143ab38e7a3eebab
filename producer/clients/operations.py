"""The methods of clients, written once: each operation is a method of `Client` and `AsyncClient`.

An operation does no I/O itself: it says which steps to take, and a client takes them. The method
has the operation's docstring, and its parameters after `keys`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from promptq.producer.admin.api_keys import api_keys as api_keys
from promptq.producer.admin.api_keys import create_api_key as create_api_key
from promptq.producer.admin.api_keys import revoke_api_key as revoke_api_key
from promptq.producer.admin.dead_letters import dead_letter as dead_letter
from promptq.producer.admin.dead_letters import dead_letters as dead_letters
from promptq.producer.admin.overview import keep_statistics as keep_statistics
from promptq.producer.admin.overview import overview as overview
from promptq.producer.admin.overview import statistics as statistics
from promptq.producer.admin.overview import worker as worker
from promptq.producer.admin.queue_control import drain as drain
from promptq.producer.admin.queue_control import pause as pause
from promptq.producer.admin.queue_control import reprioritise as reprioritise
from promptq.producer.admin.queue_control import resume as resume
from promptq.producer.admin.queue_stats import stats as stats
from promptq.producer.admin.queue_views import forget_model as forget_model
from promptq.producer.admin.queue_views import models as models
from promptq.producer.admin.queue_views import queue_of_model as queue_of_model
from promptq.producer.admin.queue_views import queue_of_request as queue_of_request
from promptq.producer.admin.queue_views import set_alias as set_alias
from promptq.producer.admin.scaling import scaling as scaling
from promptq.producer.admin.scaling import scalings as scalings
from promptq.producer.admin.timeline import timeline as timeline
from promptq.producer.clients import forks
from promptq.producer.clients.request_builder import (
    Messages,
    Prompt,
    call_fields,
    compose,
    compose_embeddings,
    compose_samples,
)
from promptq.producer.clients.results import Embeddings, Samples, checked_vector, fold
from promptq.shared.protocol.events import Result
from promptq.shared.protocol.keys import Keys, check_request_id
from promptq.shared.protocol.replies import CancelStatus
from promptq.shared.protocol.request import NewRequest, Pooling, RequestState
from promptq.shared.queue import lookups, request_queue, scripts
from promptq.shared.queue.call import Operation

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Enqueue:
    """A step that enqueues requests, with spans if the client traces. Gives their ids."""

    new: list[NewRequest]


@dataclass(frozen=True, slots=True)
class ReadToEnd:
    """A step that reads a whole stream. Gives its events; raises what `stream` raises."""

    request_id: str
    timeout: float | None


def as_method(method: Method, operation: Callable[..., Operation[Any]]) -> Method:
    """Give a method the name, the docstring and the parameters of its operation."""
    signature = inspect.signature(operation)
    keys, *others = signature.parameters.values()
    shown: Any = method
    shown.__name__, shown.__doc__ = operation.__name__, operation.__doc__
    shown.__qualname__ = f"{method.__qualname__.partition('.')[0]}.{operation.__name__}"
    shown.__signature__ = signature.replace(
        parameters=[inspect.Parameter("self", keys.POSITIONAL_OR_KEYWORD), *others],
        return_annotation=str(signature.return_annotation).removeprefix("Operation[")[:-1],
    )
    return method


def enqueue(
    keys: Keys,
    /,
    prompt: Prompt | None = None,
    *,
    messages: Messages | None = None,
    request_id: str | None = None,
    delay_ms: int = 0,
    **fields: Any,
) -> Operation[str]:
    """Put one request in and give its id, a UUIDv7 unless `request_id` is given.

    `prompt` is text or token ids; `messages` goes through the model's chat template; `fields`
    are those of `promptq.shared.protocol.request.Request` (`max_tokens`, `temperature`,
    `priority`, ...). With `delay_ms` it waits at least that long.

    Raises InvalidRequestError, RequestExistsError, QueueFullError. If the reply gets lost, the
    request is sent again, and the server recognises it. If the server stays away, nobody can
    say whether the request arrived; with an `idempotency_key` it is safe to repeat the call.
    """
    request = call_fields(prompt, messages, request_id, delay_ms, fields)
    (own_id,) = yield from enqueue_many(keys, [request])
    return own_id


def enqueue_many(keys: Keys, /, requests: Iterable[Mapping[str, Any]]) -> Operation[list[str]]:
    """Put requests in, all or none, and give their ids.

    Each is a mapping of what `enqueue` takes: `{"prompt": "Once", "max_tokens": 8}`.
    """
    return (yield from enqueue_composed(keys, compose(requests)))


def enqueue_composed(keys: Keys, /, new: list[NewRequest]) -> Operation[list[str]]:
    """As `enqueue_many`, for requests of `promptq.producer.clients.request_builder.compose`."""
    return (yield Enqueue(new)) if new else []


def enqueue_samples(
    keys: Keys,
    /,
    n: int,
    prompt: Prompt | None = None,
    *,
    messages: Messages | None = None,
    request_id: str | None = None,
    delay_ms: int = 0,
    **fields: Any,
) -> Operation[list[str]]:
    """Put `n` requests with the same prompt in, all or none.

    Their ids are `ID:0` ... `ID:n-1`. If `seed` is given, their seeds are `seed + i`.
    """
    request = call_fields(prompt, messages, request_id, delay_ms, fields)
    return (yield from enqueue_composed(keys, compose_samples(n, request)))


def fork(
    keys: Keys,
    /,
    request_id: str,
    *,
    at: int | None = None,
    append: str = "",
    fork_id: str | None = None,
    delay_ms: int = 0,
    **changes: Any,
) -> Operation[str]:
    """Put a request in that goes on from the first `at` tokens of another one, and give its id.

    The other request, `request_id`, may run or have ended; without `at` it is forked at the end of
    what it has so far. The output of the fork begins with these tokens and the text `append`, and
    the model goes on behind them. They are cheap: the prompt and they are found in the prefix
    cache if their worker still has them. The id is `fork_id`, or a UUIDv7. The fork has the payload
    of the other request but for its seed and its idempotency key, and `changes` are further fields
    of it, such as `temperature`. `max_tokens` counts what is generated behind the prefix.

    Raises InvalidRequestError, also for an `at` beyond what there is, RequestNotFoundError for a
    request that is unknown or has expired, and what `enqueue` raises.
    """
    forks.check_changes(changes)
    source = yield from forks.fork_source(keys, check_request_id(request_id))
    fields, point = source.fork(at, append)
    if source.tenant:
        fields["tenant"] = source.tenant
    [new] = compose([{**fields, **changes, "request_id": fork_id, "delay_ms": delay_ms}])
    (own_id,) = yield from enqueue_composed(keys, [replace(new, forked_from=point)])
    return own_id


def result(
    keys: Keys, /, request_id: str, *, timeout: float | None = None, check: bool = True
) -> Operation[Result]:
    """Wait for the request to end and give its whole result.

    Raises RequestFailedError if it ended with an error, unless `check` is false. A request that
    was cancelled or expired gives what it had generated. Raises TimeoutError after `timeout`
    seconds; the request then goes on, unless you call `cancel`. Raises RequestNotFoundError and
    StreamChangedError as `stream` does.
    """
    events = yield ReadToEnd(check_request_id(request_id), timeout)
    return fold(request_id, events, check)


def generate(
    keys: Keys,
    /,
    prompt: Prompt | None = None,
    *,
    timeout: float | None = None,
    check: bool = True,
    **fields: Any,
) -> Operation[Result]:
    """`enqueue` and `result` in one. The request goes on if you stop waiting for it."""
    request_id = yield from enqueue(keys, prompt, **fields)
    return (yield from result(keys, request_id, timeout=timeout, check=check))


def sample(
    keys: Keys,
    /,
    n: int,
    prompt: Prompt | None = None,
    *,
    timeout: float | None = None,
    check: bool = True,
    **fields: Any,
) -> Operation[Samples]:
    """`enqueue_samples` and the results of all samples; `timeout` is for all together."""
    request_ids = yield from enqueue_samples(keys, n, prompt, **fields)
    deadline = None if timeout is None else time.monotonic() + timeout
    results = []
    for request_id in request_ids:
        left = None if deadline is None else deadline - time.monotonic()
        results.append((yield from result(keys, request_id, timeout=left, check=check)))
    return Samples(request_ids, results)


def embed(
    keys: Keys,
    /,
    texts: Prompt | Sequence[Prompt],
    *,
    pooling: Pooling | None = None,
    normalize: bool = True,
    dimensions: int | None = None,
    timeout: float | None = None,
    **fields: Any,
) -> Operation[Embeddings]:
    """Turn a text, or several, into vectors. Texts are enqueued all or none.

    A text may be token ids. `pooling` is `last` (the last token's hidden state), `mean` (of all
    tokens) or the worker's own. `dimensions` keeps so many numbers of each vector. `fields` are
    as in `enqueue`; those that generate have no meaning here. `timeout` is for all together.

    Raises what `enqueue` and `result` raise, and RequestFailedError for a request that ended
    without a vector.
    """
    embed = {"pooling": pooling, "normalize": normalize, "dimensions": dimensions}
    new = compose_embeddings(texts, {**fields, "embed": embed})
    request_ids = yield from enqueue_composed(keys, new)
    deadline = None if timeout is None else time.monotonic() + timeout
    results = []
    for request_id in request_ids:
        left = None if deadline is None else deadline - time.monotonic()
        found = yield from result(keys, request_id, timeout=left)
        results.append(checked_vector(request_id, found))
    return Embeddings(request_ids, results)


def cancel(keys: Keys, /, request_id: str) -> Operation[CancelStatus]:
    """End a request: at once if it waits, at its worker's next step if it runs."""
    statuses: list[CancelStatus] = yield scripts.cancel([check_request_id(request_id)])
    return statuses[0]


def state(keys: Keys, /, request_id: str) -> Operation[RequestState | None]:
    """The state of a request; None if it is unknown."""
    found: RequestState | None = yield lookups.state(keys, check_request_id(request_id))
    return found


def dead_ids(keys: Keys, /, limit: int = 100) -> Operation[list[str]]:
    """Ids of dead letters, the latest first."""
    found: list[str] = yield lookups.dead_ids(keys, limit)
    return found


def requeue(keys: Keys, /, request_id: str) -> Operation[str]:
    """Run a dead letter again; gives the new request's id. Raises RequestNotFoundError."""
    return (yield from request_queue.requeue(request_id))


def purge(keys: Keys, /, request_ids: Sequence[str]) -> Operation[int]:
    """Delete dead letters; gives how many there were."""
    return (yield scripts.purge(request_ids)).count("purged") if request_ids else 0
