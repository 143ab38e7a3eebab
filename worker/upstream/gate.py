"""Limits a worker's streams on a server that other clients use too.

The limit rises additively and falls multiplicatively, so several workers come closer to even shares
(Chiu and Jain, 1989). This is true only if the workers agree on the server's room (a number of
streams). So a worker computes the room from the server's numbers of running and waiting requests,
not from its earlier limits.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from contextlib import suppress

from promptq.worker.upstream.dialects.transport import OverloadedError, Server, ServerFaultError
from promptq.worker.upstream.forwarded_sequence import ForwardedSequence
from promptq.worker.upstream.server_load import ServerLoad, read_load

_INTERVAL_SECONDS = 1.0
_STEPS = 16
"""The limit rises to all slots in this number of intervals."""
_FULL_SHARE = 0.9
_KEPT = 15 / 16
"""If another client has to wait, the server's room falls to this part of the running requests or
less, so that the next request of a client finds room."""
_KEPT_UNDER_PRESSURE = 0.75
"""A worker keeps this part of its streams if the server refuses a stream, and in each interval in
which the server is full and has other clients."""
_FORGET_SECONDS = 300.0
"""If no other client has waited for this time, the worker uses all slots again. Then a request of
another client may have to wait once."""


class Gate:
    """Decides how many streams a worker may have on a server.

    Requests that wait at the server count only if other clients sent them. Without other clients, a
    worker has all slots, however many prompts wait to be computed.
    """

    def __init__(self, num_slots: int) -> None:
        """Begins with a limit of `num_slots`, the largest number of streams."""
        self.is_load_reported = True
        """False once the server has refused to report its load. Set it to True after a recovery."""
        self._num_slots = num_slots
        self._most = float(num_slots)
        self._room = math.inf  # for streams of all clients
        self._seconds_since_wait = 0.0
        self._num_others = 0.0  # streams of other clients
        self._reason = ""

    @property
    def limit(self) -> int:
        """The most streams that may run on the server now. With at least one, a worker learns from
        that stream when the server has capacity again."""
        return max(1, int(self._most))

    @property
    def why(self) -> str:
        """The reason why the limit is below the number of slots; empty for a full limit."""
        return f"{self._reason}: at most {self.limit} streams" if self.is_lowered else ""

    @property
    def is_lowered(self) -> bool:
        return self.limit < self._num_slots

    async def watch(
        self,
        server: Server,
        streams: Callable[[], Collection[ForwardedSequence]],
        heed: Callable[[], None],
    ) -> None:
        """Read the server's load once a second, set the limit, and call `heed`.

        `streams` returns the worker's open streams. This method never returns.
        """
        num_before = 0
        while True:
            await asyncio.sleep(_INTERVAL_SECONDS)
            before = [*streams()]
            silent = sum(stream.timing.first_token_at is None for stream in before)
            load = None  # unknown after a fault, which the streams notice too
            with suppress(ServerFaultError, OverloadedError):
                if self.is_load_reported:
                    load = await read_load(server)
                    self.is_load_reported = load is not None
            now = [*streams()]
            # The report may be older than the end of a stream, or newer than the beginning of one.
            opened = len(set(now) - set(before))
            own = max(len(before) + opened, num_before)
            self._read(load, own, silent + opened, len(now))
            num_before = len(now)
            heed()

    def overloaded(self, num_streams: int) -> None:
        """Lower the limit, because the server accepts no more than `num_streams` of this worker."""
        self._room = max(1.0, _KEPT_UNDER_PRESSURE * (num_streams + self._num_others))
        self._seconds_since_wait = 0.0
        self._set_limit(num_streams, "the server refused requests for now")

    def _read(self, load: ServerLoad | None, own: int, silent: int, num_streams: int) -> None:
        """Apply the load, once a second. Of the worker's `own` streams, `silent` may be waiting at
        the server. `num_streams` streams are open now."""
        load = load or ServerLoad(0.0)
        self._num_others = max(0.0, load.num_running + load.num_waiting - own)
        num_waiting = min(self._num_others, load.num_waiting - silent)
        is_full = self._num_others > 0 and load.used_share > _FULL_SHARE
        kept = _KEPT * load.num_running
        if num_waiting > 0:
            reason = f"{num_waiting:.0f} requests of other clients wait at the server"
            self._seconds_since_wait = 0.0
            if not is_full:  # else the size of the requests is the reason, and not their number
                self._room = min(self._room, max(1.0, min(kept, load.num_running - num_waiting)))
        else:
            reason = f"the server is {load.used_share:.0%} full" if is_full else ""
            self._seconds_since_wait += _INTERVAL_SECONDS
            has_forgotten = self._seconds_since_wait > _FORGET_SECONDS
            self._room = math.inf if has_forgotten else max(self._room, kept)
        self._set_limit(num_streams, reason, 1 / _KEPT_UNDER_PRESSURE if is_full else 0.0)

    def _set_limit(self, num_streams: int, reason: str, pressure: float = 0.0) -> None:
        """Lower the limit to `num_streams / pressure` if pressure exceeds 1; otherwise raise it."""
        pressure = max(pressure, (num_streams + self._num_others) / self._room)
        self._reason = reason or "the server was full lately"
        if pressure > 1:
            self._most = min(self._most, num_streams / pressure)
        else:
            raised = self._most + max(1.0, self._num_slots / _STEPS)
            self._most = min(self._num_slots, raised, self._room - self._num_others)
