"""The order of one request's stream: replay, repeats, gaps, silence, lost connections.

Does no I/O itself. `follow` yields what is to be done and is sent what came of it, so that the
rules stand here once and the clients only carry them out. In short: what is heard on the channel
is trusted only where it continues what was delivered; whenever something may have been missed
(at the start, after a reconnection, on a jump of `index`, after some silence), the log is read.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import redis
from pydantic import BaseModel, ValidationError

from promptq.shared.errors import RequestNotFoundError, StreamChangedError
from promptq.shared.protocol.events import TokenEvent, TokenLogprob
from promptq.shared.protocol.keys import Keys
from promptq.shared.queue import lookups
from promptq.shared.queue.call import Call, is_wrong_type

T = TypeVar("T")

SILENCE_SECONDS = 3.0
"""After so long without an event the log is read: a last event that was lost leaves no gap."""

GIVE_UP_SECONDS = 60.0
"""How long a stream tries to get a connection back."""

_FIRST_BACKOFF_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Drop any subscription there is and open a new one; answered with None."""

    channel: str
    sharded: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """Answered with what the call gives."""

    call: Call[Any]


@dataclass(frozen=True, slots=True)
class Wait:
    """Answered with what the subscription brings within so many seconds, see `heard`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Sleep:
    """Answered with None, after so many seconds."""

    seconds: float


Action = Subscribe | Ask | Wait | Sleep | TokenEvent
"""An event is the stream's next one, to be handed out; answered with None."""

Steps = Generator[Action, Any, None]


class Subscribed(Enum):
    """Heard when the server confirms a subscription, again also after a reconnection."""

    SUBSCRIBED = "subscribed"


class Missed(Enum):
    """Heard in the place of messages that were dropped."""

    MISSED = "missed"


def heard(message: dict[str, Any] | None) -> bytes | Subscribed | None:
    """What a redis-py pub/sub message says: an event, a confirmed subscription, or nothing."""
    kind = message["type"] if message else None
    if message and kind in ("message", "smessage"):
        data: bytes = message["data"]
        return data
    return Subscribed.SUBSCRIBED if kind in ("subscribe", "ssubscribe") else None


def advance(steps: Steps, answer: Any) -> Action | None:
    """Give the answer to the last action, an exception if it failed; None when the stream ended."""
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
    """Stream a request, from its first event or the one that holds token `from_index`, to its last.

    A request whose log was folded into its result gives one event with all that is left. Only if
    the stream began at a later index, where the borders of its text are lost with the log, that
    event has `index` 0 and holds everything. A user who may not read requests' records streams what
    log and channel tell, and waits where a log is gone or never was.

    Raises RequestNotFoundError, StreamChangedError, TimeoutError after `timeout` seconds, and what
    redis-py raises when the server stays away.
    """
    return _Stream(keys, request_id, from_index, silence, timeout, clock).steps()


class _Folded(BaseModel):
    """What the log held, as the record's `result` keeps it."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None


_Ending = tuple[bool, TokenEvent | None, _Folded | None]
_NOTHING: _Ending = (False, None, None)


class _Stream:
    def __init__(
        self,
        keys: Keys,
        request_id: str,
        from_index: int,
        silence: float,
        timeout: float | None,
        clock: Callable[[], float],
    ) -> None:
        self._keys = keys
        self._id = request_id
        self._from_index = from_index
        self._position = from_index
        self._text_from: int | None = None  # index of the first event delivered
        self._text_length = 0
        self._token_ids = array("q")  # delivered, from `_text_from` on
        self._is_barred = False  # from the request's record
        self._was_cut = False  # from the server, which may have lost writes meanwhile
        self._ended = False
        self._silence = silence
        self._timeout = timeout
        self._clock = clock
        self._deadline = None if timeout is None else clock() + timeout
        self._failures = 0
        self._lost_at = 0.0

    def steps(self) -> Steps:
        while not self._ended:
            try:
                yield from self._listen()
            except (redis.ConnectionError, redis.TimeoutError) as error:
                if isinstance(error, redis.AuthenticationError):
                    raise
                self._was_cut = True
                if self._failures == 0:
                    self._lost_at = self._clock()
                elif self._clock() - self._lost_at >= GIVE_UP_SECONDS:
                    raise
                self._failures += 1
                yield Sleep(min(self._backoff(), self._patience()))

    def _listen(self) -> Steps:
        sharded = yield Ask(_is_sharded(self._keys))
        yield Subscribe(self._keys.events(self._id), sharded)
        while not self._ended:
            answer = yield Wait(self._patience())
            event = _parse(answer) if isinstance(answer, bytes) else None
            if event is not None and event.index <= self._position:
                yield from self._continue(event)
            else:
                if answer is Subscribed.SUBSCRIBED and self._token_ids:
                    self._was_cut = True
                yield from self._catch_up()
                self._failures = 0  # the server answers, however short its visit

    def _continue(self, event: TokenEvent) -> Steps:
        """Deliver an event of the log or the channel, less what was delivered before."""
        self._check(event.index, event.token_ids)
        if not event.is_last and event.end <= self._position:
            return
        if event.index < self._position and self._text_from is not None:
            event = yield from self._beyond(event)
        if event.is_last and self._was_cut:  # what took the place of lost tokens may be unheard
            record = yield from self._read_record()
            if record is not None and (result := record[2]) is not None:
                self._check(0, result.token_ids)
        yield self._delivered(event)

    def _check(self, index: int, token_ids: list[int]) -> None:
        """Raise StreamChangedError if these, from `index` on, are not those that were delivered."""
        if self._text_from is None or index >= self._position:
            return
        start = max(index, self._text_from)
        theirs = token_ids[start - index : self._position - index]
        ours = self._token_ids[start - self._text_from :].tolist()[: len(theirs)]
        if ours != theirs:
            at = next(n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            raise StreamChangedError(
                f"request {self._id!r}: the server lost tokens that this stream has delivered, and"
                f" other ones took their place from token {start + at} on; read the request anew"
            )

    def _delivered(self, event: TokenEvent) -> TokenEvent:
        """The event, from now on delivered."""
        if self._text_from is None:
            self._text_from = event.index
        self._position = max(self._position, event.end)
        self._token_ids.extend(event.token_ids)
        self._text_length += len(event.text)
        self._ended = event.is_last
        self._failures = 0
        return event

    def _beyond(self, event: TokenEvent) -> Generator[Action, Any, TokenEvent]:
        """What an event brings beyond the tokens that were delivered.

        Its log was lost in part, as in a failover, and another worker went on with other borders.
        """
        text = ""
        call = lookups.log_after(self._keys, self._id, 0)
        for entry in (yield from self._ask(call, list[bytes]())):
            logged = _parse(entry)
            if (
                logged is not None
                and logged.index >= (self._text_from or 0)
                and logged.end <= event.end
            ):
                text += logged.text
        start = self._position - event.index
        return event.model_copy(
            update={
                "index": self._position,
                "token_ids": event.token_ids[start:],
                "text": text[self._text_length :],
                "logprobs": event.logprobs and event.logprobs[start:],
            }
        )

    def _catch_up(self) -> Steps:
        """Deliver what the log has, or where it has nothing new, what the record tells."""
        if (yield from self._read_log()):
            return
        record = yield from self._read_record()
        if record is None:
            return  # only the log and the channel tell
        has_state, last_event, result = record
        over = last_event is not None and result is not None
        if not over and (has_state or (yield from self._is_known())):
            return  # it waits or runs, and there is nothing new
        # It may have ended between the reads.
        if (yield from self._read_log()):
            return
        if last_event is None or result is None:
            raise RequestNotFoundError(
                f"no request {self._id!r} is known; it was never enqueued in the queue"
                f" {self._keys.queue!r}, or its record has expired"
            )
        self._check(0, result.token_ids)
        yield self._delivered(self._rest(last_event, result))

    def _read_log(self) -> Generator[Action, Any, bool]:
        """Deliver what continues the stream; whether there was any."""
        before = self._position
        call = lookups.log_after(self._keys, self._id, before)
        for entry in (yield from self._ask(call, list[bytes]())):
            event = _parse(entry)
            if event is None or event.index > self._position:
                break
            yield from self._continue(event)
        return self._ended or self._position > before

    def _read_record(self) -> Generator[Action, Any, _Ending | None]:
        """What the record tells of the end; None where this user may not read it.

        It is tried once a stream, so that the server's log of refusals stays short.
        """
        if self._is_barred:
            return None
        try:
            return (yield from self._ask(_ending(self._keys, self._id), _NOTHING))
        except redis.exceptions.NoPermissionError:
            self._is_barred = True
            return None

    def _is_known(self) -> Generator[Action, Any, bool]:
        """Whether a record that says nothing belongs to a request that plain commands enqueued.

        Asked by plain commands too: who only reads may run no script.
        """
        if (yield from self._ask(lookups.state(self._keys, self._id), None)) is not None:
            return True
        tenants = yield from self._ask(_tenants_waiting(self._keys), list[bytes]())
        for key in [self._keys.pending.encode(), *tenants]:
            if (yield from self._ask(Call("", ["ZSCORE", key, self._id], _is_there), False)):
                return True
        return False

    def _rest(self, last_event: TokenEvent, result: _Folded) -> TokenEvent:
        """The last event, made to hold all of the result that was not delivered."""
        start, text_start = self._position, self._text_length
        if self._from_index >= len(result.token_ids):
            start, text_start = len(result.token_ids), len(result.text)
        elif self._from_index > 0:
            start, text_start = 0, 0
        logprobs = result.logprobs and result.logprobs[start:]
        return last_event.model_copy(
            update={
                "index": start,
                "token_ids": result.token_ids[start:],
                "text": result.text[text_start:],
                "logprobs": logprobs or None,
            }
        )

    def _ask(self, call: Call[T], otherwise: T) -> Generator[Action, Any, T]:
        """What the call gives; `otherwise` if a stranger's key of another type is in its place."""
        try:
            answer: T = yield Ask(call)
        except redis.ResponseError as error:
            if not is_wrong_type(error):
                raise
            return otherwise
        return answer

    def _patience(self) -> float:
        """Seconds to wait for the next event. Raises TimeoutError when the stream's time is up."""
        if self._deadline is None:
            return self._silence
        left = self._deadline - self._clock()
        if left <= 0:
            raise TimeoutError(f"request {self._id!r} did not end within {self._timeout} seconds")
        return min(self._silence, left)

    def _backoff(self) -> float:
        """Seconds until the next try, spread so that clients do not return all at once."""
        longest = min(_FIRST_BACKOFF_SECONDS * 2**self._failures, _MAX_BACKOFF_SECONDS)
        return random.uniform(longest / 2, longest)  # noqa: S311 # spreads retries


def _parse(event: bytes) -> TokenEvent | None:
    """None for what is no event: anybody may publish on a channel."""
    try:
        return TokenEvent.model_validate_json(event)
    except ValidationError:
        return None


def _is_sharded(keys: Keys) -> Call[bool]:
    return Call("", ["HGET", keys.config, "pubsub"], lambda reply: reply == b"sharded")


def _tenants_waiting(keys: Keys) -> Call[list[bytes]]:
    """Where ids of tenants wait."""
    prefix = keys.pending.encode() + b":"
    return Call("", ["SMEMBERS", keys.tenants_waiting], lambda reply: [prefix + it for it in reply])


def _is_there(score: Any) -> bool:
    return score is not None


def _ending(keys: Keys, request_id: str) -> Call[_Ending]:
    """Whether there is a state, the last event, the result: all but the payload, which is large."""

    def parse(reply: list[Any]) -> _Ending:
        state, last_event, result = reply
        return (
            state is not None,
            TokenEvent.model_validate_json(last_event) if last_event else None,
            _Folded.model_validate_json(result) if result else None,
        )

    return Call("", ["HMGET", keys.request(request_id), "state", "last_event", "result"], parse)
