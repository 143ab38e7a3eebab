"""The state of queues in a few numbers, and which queues of a server serve which model."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from redis.exceptions import ResponseError

from promptq.producer.admin.request_fields import whole
from promptq.shared.errors import ConfigurationError, ModelNotServedError
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.output_style import OutputStyle
from promptq.shared.queue import lookups
from promptq.shared.queue.call import Call, Operation

_REPORTED = ("model", "tool_call_style")
_OF_MODEL = (*_REPORTED, "fingerprint")
_CONFIGURED = (*_REPORTED, "paused", "shortest_first_ms")
MOST_QUEUES = 256
"""The most queues of a server that are read. A longer list must be a mistake or an attack."""
_LONGEST_NAME = 200
_MOST_NAMED = 20
"""The most models that an error message names."""


@dataclass(frozen=True, slots=True)
class QueueView:
    """State of a queue. `model` is the model that workers reported last; empty if none did."""

    queue: str
    model: str
    output_style: OutputStyle | None
    num_workers: int
    num_waiting: int
    num_active: int
    """Number of requests that workers hold."""
    num_delayed: int
    is_paused: bool
    is_shortest_first: bool
    """Whether the expected outputs of requests change their order."""
    has_standby: bool
    """Whether a worker that loads several models in turns also serves this queue."""
    max_model_len: int | None
    """The most tokens of prompt and output that every worker accepts; None without a worker."""
    refused: tuple[str, ...]
    """The request fields that every worker refuses, sorted."""

    @property
    def has_worker(self) -> bool:
        return self.num_workers > 0 or self.has_standby

    @property
    def hands_out(self) -> bool:
        """Whether workers claim the queue's requests now."""
        return self.has_worker and not self.is_paused

    def load(self, num_sent: int = 0) -> tuple[bool, float]:
        """Returns a sort key for queues of one model: the least work per worker sorts first.

        `num_sent` counts requests that were sent to the queue and are not in its numbers yet.
        """
        num_requests = self.num_waiting + self.num_active + num_sent
        return not self.hands_out, num_requests / max(1, self.num_workers)


@dataclass(slots=True)
class ServedModel:
    """A model, its queues, and its aliases."""

    name: str
    queues: list[QueueView] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)


def queue_view(keys: Keys, /) -> Operation[QueueView]:
    """Reads the current state of the queue."""
    (*current, standby_until), earlier, now_ms, waiting, active, delayed = yield [
        Call("", ["HMGET", keys.model, *_REPORTED, "standby_until"], list, lambda: [None] * 3),
        Call("", ["HMGET", keys.config, *_CONFIGURED], list, lambda: [None] * 4),
        lookups.server_time_ms(),
        lookups.count(keys),
        Call("", ["ZCARD", keys.leases], int, lambda: 0),
        Call("", ["ZCARD", keys.delayed], int, lambda: 0),
    ]
    workers = yield lookups.live_worker_ids(keys, now_ms)
    abilities = []
    if workers:
        abilities = yield [
            Call("", ["HMGET", keys.worker(worker), "max_model_len", "refused"], list, list)
            for worker in workers
        ]
    abilities = [(whole(length), _fields(refused)) for length, refused in filter(None, abilities)]
    # Workers of earlier releases write the model into `config`.
    *earlier, paused, shortest_first_ms = earlier
    model, style = current if current[0] is not None else earlier
    lists = [refused for _, refused in abilities]
    return QueueView(
        queue=keys.queue,
        model=(model or b"").decode(errors="replace"),
        output_style=OutputStyle.from_json(style) if style else None,
        num_workers=len(workers),
        num_waiting=waiting,
        num_active=active,
        num_delayed=delayed,
        is_paused=paused == b"1",
        is_shortest_first=bool(whole(shortest_first_ms)),
        has_standby=lookups.is_later(standby_until, now_ms),
        max_model_len=min((length for length, _ in abilities if length), default=None),
        refused=tuple(sorted(frozenset.intersection(*lists) if lists else ())),
    )


def models(keys: Keys, /) -> Operation[list[ServedModel]]:
    """Reads the models of all queues of the server, sorted by name."""
    models: dict[str, ServedModel] = {}
    for view in (yield from views_of_queues(keys)):
        if view.model:
            models.setdefault(view.model, ServedModel(view.model)).queues.append(view)
    for alias, name in sorted((yield from _aliases()).items()):
        if name in models and alias not in models:
            models[name].aliases.append(alias)
    return [models[name] for name in sorted(models)]


def queue_of_model(keys: Keys, /, model: str) -> Operation[str]:
    """Reads which queue serves a model. `model` is the model's name or an alias.

    Of several queues, returns the one with the fewest requests per worker. Raises
    ModelNotServedError.
    """
    aliases = yield from _aliases()
    views = yield from views_of_queues(keys)
    serving = [view for view in views if view.model == model]
    serving = serving or [view for view in views if view.model == aliases.get(model)]
    if not serving:
        raise ModelNotServedError(not_served(model, {view.model for view in views}))
    return min(serving, key=QueueView.load).queue


def queue_of_request(keys: Keys, /, request_id: str) -> Operation[str]:
    """Reads which queue has the request. Returns this client's queue if no queue has it."""
    if (yield from _has(keys, request_id)):
        return keys.queue
    for name in (yield from _others(keys)):
        if (yield from _has(Keys(name), request_id)):
            return name
    return keys.queue


def _has(keys: Keys, request_id: str) -> Operation[bool]:
    with suppress(ResponseError):  # a queue that the Redis user may not read
        return (yield Call("", ["EXISTS", keys.request(request_id)], bool)) is True
    return False


def set_alias(keys: Keys, /, alias: str, model: str) -> Operation[None]:
    """Sets an alias of a model. Raises ConfigurationError if the alias is not valid, or is the name
    of a model. Raises ModelNotServedError if no queue has the model."""
    if not 0 < len(alias) <= _LONGEST_NAME or not alias.isprintable():
        raise ConfigurationError(
            f"alias: {alias[:80]!r} is not 1 to {_LONGEST_NAME} printable characters"
        )
    names = {view.model for view in (yield from views_of_queues(keys))}
    if alias in names:
        raise ConfigurationError(f"alias: {alias!r} is the name of a model that is served")
    if model not in names:
        raise ModelNotServedError(not_served(model, names))
    yield lookups.set_alias(alias, model)


def forget_model(keys: Keys, /, name: str) -> Operation[list[str]]:
    """Deletes an alias, or a model that no worker serves. Returns the names of the model's queues.

    Raises ModelNotServedError for an unknown name, ConfigurationError if a queue is still in use.
    """
    views = yield from views_of_queues(keys)
    serving = [view for view in views if view.model == name]
    if (yield lookups.forget_alias(name)) and not serving:
        return []
    if not serving:
        raise ModelNotServedError(not_served(name, {view.model for view in views}))
    for view in serving:
        num_left = view.num_waiting + view.num_active + view.num_delayed
        if view.num_workers or num_left:
            raise ConfigurationError(
                f"queue {view.queue} is in use (workers: {view.num_workers}, requests: {num_left});"
                f" {name!r} can be forgotten when both are 0"
            )
        if view.has_standby:
            raise ConfigurationError(
                f"queue {view.queue}: a worker loads {name!r} when its turn comes; it can be"
                " forgotten once that worker has ended"
            )
    for view in serving:
        gone = Keys(view.queue)
        yield [
            Call("", ["DEL", gone.model], int),
            Call("", ["HDEL", gone.config, *_OF_MODEL], int),
            lookups.forget_queue(view.queue),
        ]
    return [view.queue for view in serving]


def not_served(model: str, served: Iterable[str]) -> str:
    """Returns the error message for a model that no queue serves. It names the `served` models."""
    names = sorted(filter(None, served))
    if not names:
        return f"model: no queue serves {model[:200]!r}, or any other model yet"
    shown = ", ".join(repr(name[:200]) for name in names[:_MOST_NAMED])
    shown += ", ..." * (len(names) > _MOST_NAMED)
    there_are = "there is" if len(names) == 1 else "there are"
    return f"model: no queue serves {model[:200]!r}; {there_are} {shown}"


def views_of_queues(keys: Keys, /) -> Operation[list[QueueView]]:
    """Reads the states of all queues that this Redis user may read, sorted by name."""
    views: list[QueueView] = []
    for name in sorted([keys.queue, *(yield from _others(keys))]):
        try:
            views += [(yield from queue_view(Keys(name)))]
        except ResponseError:
            if name == keys.queue:
                raise
    return views


def _others(keys: Keys) -> Operation[list[str]]:
    names: list[str] = []
    with suppress(ResponseError):  # such as a role of one queue, or another shard
        names = yield lookups.queue_names()
    return [name for name in names[:MOST_QUEUES] if name != keys.queue]


def _aliases() -> Operation[dict[str, str]]:
    with suppress(ResponseError):
        aliases: dict[str, str] = yield lookups.aliases()
        return aliases
    return {}


def _fields(value: bytes | None) -> frozenset[str]:
    return frozenset((value or b"").decode(errors="replace").split())
