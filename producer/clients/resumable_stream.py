"""The rules for one request's stream: replay, repetitions, gaps, silence, lost connections.

This module does no I/O. `follow` yields actions and receives their results, so both clients use the
same rules and only carry out the actions. In short: the stream delivers an event of the pub/sub
channel only if the event continues the delivered events. Whenever an event may be missing (at the
start, after a reconnection, when `index` jumps, after some silence), the stream reads the log.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import redis
from pydantic import BaseModel, ValidationError
from redis.backoff import EqualJitterBackoff

from promptq.shared.errors import RequestNotFoundError, SpoiltRecordError, StreamChangedError
from promptq.shared.protocol.events import StoredTokenId, TokenEvent, TokenLogprob
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.request import RequestState
from promptq.shared.queue import lookups
from promptq.shared.queue.call import Call
from promptq.shared.queue.spoilt import is_wrong_type
from promptq.shared.runtime.large_json import object_in
from promptq.shared.runtime.turns import Work, sliced
from promptq.shared.server.retry import is_away

T = TypeVar("T")
_Kind = TypeVar("_Kind", bound=BaseModel)

_LARGE_BYTES = 65_536
"""Bytes up to which an event is parsed in one go. A larger event is parsed in slices."""

SILENCE_SECONDS = 3.0
"""Seconds without an event after which the stream reads the log, as an event may be lost."""

GIVE_UP_SECONDS = 60.0
"""Seconds for which a stream tries to reconnect."""

_BACKOFF = EqualJitterBackoff(cap=4.0, base=0.1)


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Action: subscribe the stream to `channel` instead of its previous channel. The answer is
    None."""

    channel: str
    sharded: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """Action: send a call to the server. The answer is the call's value."""

    call: Call[Any]


@dataclass(frozen=True, slots=True)
class Wait:
    """Action: wait for a message. The answer is the result of `heard`, or None after `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Sleep:
    """Action: sleep for `seconds`. The answer is None."""

    seconds: float


Action = Subscribe | Ask | Wait | Sleep | TokenEvent
"""An action of a stream. A TokenEvent is the next event for the reader; its answer is None."""

Steps = Generator[Action, Any, None]


class Notice(Enum):
    """A change of a subscription. A notice arrives among the messages of the channel."""

    SUBSCRIBED = "subscribed"
    """The server has confirmed the subscription. Arrives again after each reconnection."""
    MISSED = "missed"
    """Messages were dropped, because the stream did not handle them in time."""


def heard(message: dict[str, Any] | None) -> bytes | Notice | None:
    """Returns the JSON of the event in a pub/sub message of redis-py.

    Returns `Notice.SUBSCRIBED` for a new subscription, and None for other messages. Raises
    redis.ConnectionError if the server has ended the subscription by itself.
    """
    kind = message["type"] if message else None
    if kind == "sunsubscribe":
        raise redis.ConnectionError("the cluster has moved the channel to another node")
    if message and kind in ("message", "smessage"):
        data: bytes = message["data"]
        return data
    return Notice.SUBSCRIBED if kind in ("subscribe", "ssubscribe") else None


def advance(steps: Steps, answer: Any) -> Action | None:
    """Resumes a stream with the answer to its last action.

    If the answer is an exception, the exception is raised inside the stream. Returns the stream's
    next action; None at the stream's end.
    """
    try:
        return steps.throw(answer) if isinstance(answer, Exception) else steps.send(answer)
    except StopIteration:
        return None


def follow(
    keys: Keys,
    request_id: str,
    from_index: int = 0,
    *,
    silence: float = SILENCE_SECONDS,
    timeout: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Steps:
    """Streams a request's events. The first one contains token `from_index` (counted from 0).

    Workers publish each event on the request's channel, and keep the event in the request's log.
    After the request's end, its result replaces the log. Then one event delivers all remaining
    output. A result does not show which text belongs to which token, so if `from_index` is above 0
    and inside the output, this event has `index` 0 and the whole output. A Redis user who may not
    read requests' records gets only events of the log and the channel, and waits for these.

    A published event may be lost, so after `silence` seconds without an event the stream reads the
    log.

    Raises RequestNotFoundError, SpoiltRecordError, StreamChangedError, TimeoutError after `timeout`
    seconds, and the errors of redis-py if the server stays away.
    """
    return _Stream(keys, request_id, from_index, silence, timeout, clock).steps()


class _Folded(BaseModel):
    """The output of an ended request: the record's field `result`, which outlives the log."""

    text: str
    token_ids: list[StoredTokenId]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    prompt_texts: list[str] | None = None


def _logprob_of(item: Any) -> TokenLogprob | None:
    return None if item is None else TokenLogprob.model_validate(item)


_Readers = Mapping[str, Callable[[Any], Any]]
_READERS: _Readers = dict.fromkeys(("logprobs", "prompt_logprobs"), _logprob_of)
_WITHOUT_PROMPT: _Readers = {**_READERS, "prompt_logprobs": lambda item: None}


def _read_in_parts(kind: type[_Kind], text: bytes, readers: _Readers) -> Work[_Kind | None]:
    """Parses JSON as a `kind`, in slices. Returns None if the JSON is not valid."""
    try:
        return kind.model_validate((yield from object_in(text.decode(), readers)))
    except (ValueError, RecursionError):
        return None


def _folded_in(result: bytes) -> Generator[Action, Any, _Folded | None]:
    return (yield from sliced(_read_in_parts(_Folded, result, _READERS), Sleep(0)))


def _event_in(
    text: bytes, readers: _Readers = _READERS
) -> Generator[Action, Any, TokenEvent | None]:
    """Parses an event, in slices if the text is large. Returns None if the text is no event."""
    if len(text) > _LARGE_BYTES:  # such an event has the logprobs of a whole prompt
        return (yield from sliced(_read_in_parts(TokenEvent, text, readers), Sleep(0)))
    try:
        return TokenEvent.model_validate_json(text)
    except ValidationError:
        return None


_Ending = tuple[RequestState | None, bytes | None, bytes | None]
"""The request's state, last event and result. The last event and the result may be large."""

_NOTHING: _Ending = (None, None, None)
_NOTHING_OF_PROMPT: dict[str, Any] = {"prompt_logprobs": None, "prompt_texts": None}


@dataclass
class _Stream:
    keys: Keys
    id: str
    from_index: int
    silence: float
    timeout: float | None
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._position = self.from_index
        self._text_from: int | None = None  # index of the first event delivered
        self._text_length = 0
        self._token_ids = array("q")  # delivered tokens, from `_text_from` on
        self._may_not_read = False  # whether this user may not read the request's record
        self._was_cut = False  # whether the connection was lost: writes may be lost too
        self._ended = False
        self._deadline = None if self.timeout is None else self.clock() + self.timeout
        self._failures = 0
        self._lost_at = 0.0

    def steps(self) -> Steps:
        while not self._ended:
            try:
                yield from self._listen()
            except redis.RedisError as error:
                if not is_away(error):
                    raise
                self._was_cut = True
                if self._failures == 0:
                    self._lost_at = self.clock()
                elif self.clock() - self._lost_at >= GIVE_UP_SECONDS:
                    raise
                self._failures += 1
                yield Sleep(min(_BACKOFF.compute(self._failures), self._patience()))

    def _listen(self) -> Steps:
        config = self.keys.config
        sharded = yield Ask(Call("", ["HGET", config, "pubsub"], lambda reply: reply == b"sharded"))
        yield Subscribe(self.keys.events(self.id), sharded)
        while not self._ended:
            answer = yield Wait(self._patience())
            event = (yield from _event_in(answer)) if isinstance(answer, bytes) else None
            if event is not None and event.index <= self._position:
                yield from self._continue(event)
            else:
                if answer is Notice.SUBSCRIBED and self._token_ids:
                    self._was_cut = True
                yield from self._catch_up()
                self._failures = 0  # the server has answered, even if the next call fails

    def _continue(self, event: TokenEvent) -> Steps:
        """Delivers an event of the log or the channel, without already delivered tokens."""
        self._check(event.index, event.token_ids)
        if not event.is_last and event.end <= self._position:
            return
        if event.index < self._position and self._text_from is not None:
            event = yield from self._beyond(event)
        if event.is_last and self._was_cut:  # unseen tokens may have replaced lost ones
            record = yield from self._read_record()
            if record is not None and record[2] is not None:
                result = yield from _folded_in(record[2])
                if result is not None:
                    self._check(0, result.token_ids)
        yield self._delivered(event)

    def _check(self, index: int, token_ids: list[int]) -> None:
        """Raises StreamChangedError if `token_ids` at `index` differ from the delivered tokens."""
        if self._text_from is None or index >= self._position:
            return
        start = max(index, self._text_from)
        theirs = token_ids[start - index : self._position - index]
        ours = self._token_ids[start - self._text_from :].tolist()[: len(theirs)]
        if ours != theirs:
            at = next(n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            raise StreamChangedError(
                f"request {self.id!r}: the server lost tokens that this stream has delivered, and"
                f" other ones took their place from token {start + at} on; read the request anew"
            )

    def _delivered(self, event: TokenEvent) -> TokenEvent:
        if self._text_from is None:
            self._text_from = event.index
        self._position = max(self._position, event.end)
        self._token_ids.extend(event.token_ids)
        self._text_length += len(event.text)
        self._ended = event.is_last
        self._failures = 0
        return event

    def _beyond(self, event: TokenEvent) -> Generator[Action, Any, TokenEvent]:
        """Returns the event without already delivered tokens.

        After a failover that lost a part of the log, another worker sends this part again. The new
        events may begin at other tokens than the lost events.
        """
        text = ""
        call = lookups.log_after(self.keys, self.id, 0)
        for entry in (yield from self._ask(call, list[bytes]())):
            logged = yield from _event_in(entry)
            if logged and logged.index >= (self._text_from or 0) and logged.end <= event.end:
                text += logged.text
        start = self._position - event.index
        return event.model_copy(
            update={
                "index": self._position,
                "token_ids": event.token_ids[start:],
                "text": text[self._text_length :],
                "logprobs": event.logprobs and event.logprobs[start:],
                **_NOTHING_OF_PROMPT,
            }
        )

    def _catch_up(self) -> Steps:
        """Delivers new events of the log. If there are none, delivers the result in the record."""
        if (yield from self._read_log()):
            return
        record = yield from self._read_record()
        if record is None:
            return  # only the log and the channel can be read
        state, last_event, folded = record[0], None, None
        if record[1] is not None and record[2] is not None:
            last_event = yield from _event_in(record[1], _WITHOUT_PROMPT)  # the result has it too
            if last_event is not None and last_event.is_last:
                folded = yield from _folded_in(record[2])
        over = folded is not None
        is_spoilt = not over and state is not None and state.is_final
        if not over and not is_spoilt and (state is not None or (yield from self._is_known())):
            return  # the request waits or runs, and has no new events
        # The request may have ended between the reads.
        if (yield from self._read_log()):
            return
        if is_spoilt:
            raise SpoiltRecordError(
                f"request {self.id!r}: a spoilt record: it has ended, and its fields last_event"
                " and result do not say how"
            )
        if last_event is None or folded is None:
            raise RequestNotFoundError.of(self.id, self.keys.queue)
        self._check(0, folded.token_ids)
        event = self._rest(last_event, folded)
        del folded  # so that the reader may free parts of the event
        yield self._delivered(event)

    def _read_log(self) -> Generator[Action, Any, bool]:
        """Delivers the log's events that continue the stream. Returns whether there were any."""
        before = self._position
        call = lookups.log_after(self.keys, self.id, before)
        for entry in (yield from self._ask(call, list[bytes]())):
            event = yield from _event_in(entry)
            if event is None or event.index > self._position:
                break
            yield from self._continue(event)
        return self._ended or self._position > before

    def _read_record(self) -> Generator[Action, Any, _Ending | None]:
        """Returns the record's state, last event and result; None if the Redis user may not read
        the record.

        After a refusal, the stream does not try again, to keep the server's log of refusals short.
        """
        if self._may_not_read:
            return None
        try:
            return (yield from self._ask(_ending(self.keys, self.id), _NOTHING))
        except redis.exceptions.NoPermissionError:
            self._may_not_read = True
            return None

    def _is_known(self) -> Generator[Action, Any, bool]:
        """Returns whether a request without a state exists, such as one enqueued with redis-cli.

        Runs no script, because users who may only read cannot run scripts.
        """
        if (yield from self._ask(lookups.state(self.keys, self.id), None)) is not None:
            return True
        reading: Call[list[bytes]] = Call("", ["SMEMBERS", self.keys.tenants_waiting], list)
        tenants = yield from self._ask(reading, [])
        pending = self.keys.pending.encode()
        for key in [pending, *(pending + b":" + tenant for tenant in tenants)]:
            score: Call[Any] = Call("", ["ZSCORE", key, self.id], lambda reply: reply)
            if (yield from self._ask(score, None)) is not None:
                return True
        return False

    def _rest(self, last_event: TokenEvent, result: _Folded) -> TokenEvent:
        """Returns the last event with the output in `result` that is not delivered yet."""
        start, text_start = self._position, self._text_length
        if self.from_index >= len(result.token_ids):
            start, text_start = len(result.token_ids), len(result.text)
        elif self.from_index > 0:
            start, text_start = 0, 0
        logprobs = result.logprobs and result.logprobs[start:]
        of_prompt = _NOTHING_OF_PROMPT
        if start == 0:  # the first event had the prompt's fields
            of_prompt = {name: getattr(result, name) for name in _NOTHING_OF_PROMPT}
        return last_event.model_copy(
            update={
                **of_prompt,
                "index": start,
                "token_ids": result.token_ids[start:],
                "text": result.text[text_start:],
                "logprobs": logprobs or None,
            }
        )

    def _ask(self, call: Call[T], otherwise: T) -> Generator[Action, Any, T]:
        """Returns a call's value, or the value `otherwise` if the call's key has a wrong type."""
        try:
            answer: T = yield Ask(call)
        except redis.ResponseError as error:
            if not is_wrong_type(error):
                raise
            return otherwise
        return answer

    def _patience(self) -> float:
        """Returns how many seconds to wait for an event. Raises TimeoutError after `timeout`."""
        if self._deadline is None:
            return self.silence
        left = self._deadline - self.clock()
        if left <= 0:
            raise TimeoutError(f"request {self.id!r} did not end within {self.timeout} seconds")
        return min(self.silence, left)


def _ending(keys: Keys, request_id: str) -> Call[_Ending]:
    """Reads the state, last event and result of a request, but not the large payload."""

    def parse(reply: list[Any]) -> _Ending:
        state, last_event, result = reply
        known_state = None if state is None else lookups.state_of(state)
        return known_state, last_event or None, result or None

    return Call("", ["HMGET", keys.request(request_id), "state", "last_event", "result"], parse)
