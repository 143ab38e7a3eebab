"""Replays a trace, one queue after the other, and checks replies and invariants."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hiredis

from promptq.shared.errors import PromptqError
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.keys import PREFIX, Keys
from tests.programs.simulation.server import ServerProcess, compile_library
from tests.programs.states.calls import Move
from tests.programs.states.explore import ALL_INVARIANTS
from tests.programs.states.invariants.states import (
    STATE_INVARIANTS,
    a_place_in_the_queue_is_kept,
    the_backlog_is_what_waits,
    what_workers_hold_is_counted,
)
from tests.programs.states.invariants.steps import Step, all_of
from tests.programs.states.server import Outcome, StatesServer
from tests.programs.states.world import View, World
from tests.programs.traces.recorded_moves import (
    LEVEL_MS,
    RecordedSpec,
    accepted_rows,
    lease_ms_of,
    move_of,
    payloads_of,
    session_of,
    spec_of,
)
from tests.programs.traces.trace_file import (
    UNKNOWN,
    Entry,
    Trace,
    TraceError,
    plain_reply,
    read_trace,
)

_QUEUE = re.compile(re.escape(PREFIX) + r"\{([^}]+)\}:")
_OF_ALL_REQUESTS = (
    a_place_in_the_queue_is_kept,
    the_backlog_is_what_waits,
    what_workers_hold_is_counted,
)
_OF_EACH_REQUEST = [each for each in STATE_INVARIANTS if each not in _OF_ALL_REQUESTS]
_ENQUEUEING = ("enqueue", "requeue")


class RefusedError(Exception):
    """Raised if the scripts do not do what a trace says. The message is one sentence that names the
    call."""


@dataclass
class Replayed:
    """The result of a replay."""

    num_calls: int = 0
    num_scripts: int = 0
    num_checked: int = 0
    """Number of calls whose states before and after were read and checked."""


def replay(
    trace: Trace,
    library: Path,
    kind: str = "",
    every: int = 1,
    texts: Mapping[str, str] | None = None,
) -> Replayed:
    """Replay a trace on a new server of a `kind` in PROGRAMS, and check the invariants at each call
    whose number is a multiple of `every`. `library` comes from `compile_library`. `texts` replace
    the scripts. Raises RefusedError."""
    replayed = Replayed()
    with tempfile.TemporaryDirectory(prefix="replay-") as temporary:
        for nth, (queue, entries) in enumerate(_by_queue(trace.entries).items()):
            folder = Path(temporary) / f"server-{nth}"
            folder.mkdir()
            with ServerProcess(folder, library, kind) as process:
                process.set_microseconds(entries[0][1].at_us)
                server = StatesServer(process.connected(), texts, keeps_clock=True)
                try:
                    following = _Following(Keys(queue), trace.lease_ms, process, server, every)
                    for number, entry in entries:
                        following.follow(number, entry, replayed)
                finally:
                    server.close()
    return replayed


def _by_queue(entries: Sequence[Entry]) -> dict[str, list[tuple[int, Entry]]]:
    """Returns the calls of each queue with their numbers. Keys of no queue are left out."""
    queues: dict[str, list[tuple[int, Entry]]] = {}
    for number, entry in enumerate(entries, 1):
        found = _QUEUE.match(entry.keys[0] if entry.keys else "".join(entry.args[1:2]))
        if found:
            queues.setdefault(found[1], []).append((number, entry))
    return queues


class _Following:
    """One queue, which a server takes through its calls."""

    def __init__(
        self,
        queue: Keys,
        lease_ms: int,
        process: ServerProcess,
        server: StatesServer,
        every: int,
    ) -> None:
        self._queue = queue
        self._lease_ms = lease_ms
        self._process = process
        self._server = server
        self._every = every
        self._started_us = 0
        self._aging_ms = LEVEL_MS
        self._shortest_first_ms = 0
        self._view = View(b"[]", queue)
        self._specs: dict[str, RecordedSpec] = {}
        self._tokens: dict[str, list[int]] = {}

    def follow(self, number: int, entry: Entry, replayed: Replayed) -> None:
        """Make one call, and check it."""
        self._started_us = self._started_us or entry.at_us
        self._process.set_microseconds(entry.at_us)
        replayed.num_calls += 1
        replayed.num_scripts += bool(entry.script)
        is_checked = replayed.num_calls % self._every == 0 and not entry.goes_on
        if is_checked and self._every > 1:
            self._view = self._look(self._view, entry, [])
        if is_checked:
            self._forget_expired_claim(entry)
        reply = self._call(number, entry)
        if entry.script and isinstance(reply, hiredis.ReplyError):
            raise self._refusal(number, entry, f"the script fails: {reply}")
        if entry.args[:2] == ("HSET", self._queue.config):
            settings = dict(zip(entry.args[2::2], entry.args[3::2], strict=True))
            self._aging_ms = int(settings.get("aging_ms", self._aging_ms))
            found = settings.get("shortest_first_ms", self._shortest_first_ms)
            self._shortest_first_ms = int(found)
        try:
            move = move_of(entry, self._view)
            if entry.script == "publish":
                self._learn_tokens(entry)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            problem = f"no worker or client sends such a call: {error!r}"
            raise self._refusal(number, entry, problem) from error
        if is_checked:
            replayed.num_checked += 1
            problem = next(self._problems(entry, move, reply), "")
            if problem:
                raise self._refusal(number, entry, problem)

    def _forget_expired_claim(self, entry: Entry) -> None:
        """Removes a session's last claim from the state before a call if it has expired since."""
        session = session_of(entry)
        if session in self._view.claimed:
            key = f"{self._queue.prefix}claimed:{session}"
            if not self._server.call("", [], [b"EXISTS", key.encode()]):
                del self._view.claimed[session]

    def _call(self, number: int, entry: Entry) -> Any:
        words = [word.encode("utf-8", "surrogateescape") for word in entry.args]
        try:
            reply = self._server.call(entry.script, entry.keys, words)
        except ConnectionError as error:
            raise self._refusal(number, entry, f"the server ends: {error}") from error
        if entry.reply is not UNKNOWN:
            answered, recorded = (
                _comparable(entry, plain_reply(reply)),
                _comparable(entry, entry.reply),
            )
            if answered != recorded:
                problem = f"the server replies {answered!r:.300}, the trace {recorded!r:.300}"
                raise self._refusal(number, entry, problem)
        return reply

    def _refusal(self, number: int, entry: Entry, problem: str) -> RefusedError:
        seconds = (entry.at_us - self._started_us) / 1e6
        return RefusedError(f"call {number}, {entry.name}, {seconds:.3f} s: {problem}")

    def _problems(self, entry: Entry, move: Move, reply: Any) -> Iterator[str]:
        before = self._view
        before.now_ms = entry.at_us // 1000
        heard: list[tuple[str, str]] = []
        after = self._view = self._look(before, entry, heard)
        try:
            answer = move.calls[0].parse(reply)
        except PromptqError as refusal:
            answer = refusal
        changed = _changed(before, after)
        gone = {each for each in changed if self._has_expired(before, after, each)}
        in_sets = {*after.places, *after.leases, *before.places, *before.leases}
        touched = {*changed, *move.ids, *before.held_by_last_claim(move.context.session)} - gone
        if entry.script == "enqueue" and isinstance(answer, list):
            touched |= {*answer}
        sent = payloads_of(entry)
        step = Step(
            self._world(touched | in_sets if move.kind == "reap" else touched, sent),
            before,
            move,
            Outcome(after.snapshot, [answer], heard),
            after,
        )
        for invariant in _OF_EACH_REQUEST:
            for problem in invariant(self._world(changed - gone), after):
                yield f"{invariant.__name__}: {problem}"
        for invariant in _OF_ALL_REQUESTS if after is not before else ():
            for problem in invariant(self._world(in_sets), after):
                yield f"{invariant.__name__}: {problem}"
        if entry.script:
            for name, problem in ALL_INVARIANTS.of_step(step):
                yield f"{name}: {problem}"
        yield from self._wrong_leases(entry, after)

    def _look(self, before: View, entry: Entry, heard: list[tuple[str, str]]) -> View:
        """Returns the present state. Adds the messages since the last look to `heard`."""
        snapshot, messages = self._server.read(before.snapshot)
        heard += messages
        now_ms = entry.at_us // 1000
        if snapshot == before.snapshot:
            before.now_ms = now_ms
            return before
        after = View(snapshot, self._queue, now_ms)
        for request_id, fields in after.hashes.items():
            if request_id not in self._specs and "payload" in fields:
                is_new = self._every == 1 and entry.script in _ENQUEUEING
                score = after.pending.get(request_id, float(fields.get("score", now_ms)))
                arrived_ms = now_ms if is_new else None
                spec = spec_of(
                    request_id,
                    fields["payload"],
                    arrived_ms,
                    score,
                    self._aging_ms,
                    min(self._shortest_first_ms, self._aging_ms / 2),
                )
                spec.tokens.extend(self._tokens.pop(request_id, []))
                self._specs[request_id] = spec
        return after

    def _learn_tokens(self, entry: Entry) -> None:
        for row in accepted_rows(entry):
            event = TokenEvent.model_validate_json(row.event_json)
            spec = self._specs.get(row.request_id)
            tokens = spec.tokens if spec else self._tokens.setdefault(row.request_id, [])
            if event.index == len(tokens):
                tokens += event.token_ids

    def _world(self, request_ids: set[str], sent: Mapping[str, str] | None = None) -> World:
        """Returns the world of some requests. `sent` are payloads that may have been refused."""
        known = {name: self._specs[name] for name in request_ids if name in self._specs}
        for name, payload in (sent or {}).items():
            known.setdefault(name, spec_of(name, payload, 0, 0.0))
        return World(tuple(known[name] for name in sorted(known)), frozenset())

    def _has_expired(self, before: View, after: View, request_id: str) -> bool:
        """Returns whether the server let go of an ended request between two calls."""
        key = self._queue.request(request_id)
        return key in before.expiring and key not in after.keys

    def _wrong_leases(self, entry: Entry, after: View) -> Iterator[str]:
        """A lease lasts as long as the trace's header says, from the call that gave it."""
        lease_ms = lease_ms_of(entry)
        if lease_ms is not None and lease_ms != self._lease_ms:
            yield f"it gives leases of {lease_ms} ms, the trace has leases of {self._lease_ms} ms"
        latest = after.now_ms + self._lease_ms
        for request_id, until_ms in after.leases.items():
            if until_ms > latest:
                yield f"the lease of {request_id} ends {until_ms - latest:.0f} ms too late"


def _comparable(entry: Entry, reply: Any) -> Any:
    """Returns a reply without what differs between equal servers: the place in a walk over all
    keys."""
    return reply[1:] if entry.script == "sweep" and isinstance(reply, list) else reply


def _changed(before: View, after: View) -> set[str]:
    """Returns the requests whose data or places differ."""
    if before is after:
        return set()
    ids: set[str] = set()
    for view in (before, after):
        ids |= view.hashes.keys() | view.logs.keys() | view.places.keys() | view.leases.keys()
        ids |= view.deadlines.keys() | view.dead.keys() | view.orphans.keys()
    return {each for each in ids if all_of(before, each) != all_of(after, each)}


def run_replay(path: Path, kind: str, every: int) -> int:
    """Replay the trace in a file, and print the result. Returns the exit code: 1 for a refused
    trace, 2 for a file that cannot be replayed."""
    try:
        trace = read_trace(path)
        with tempfile.TemporaryDirectory(prefix="replay-") as folder:
            replayed = replay(trace, compile_library(Path(folder)), kind, every)
    except TraceError as error:
        print(error, file=sys.stderr)
        return 2
    except RefusedError as refusal:
        print(f"{path} is refused at {refusal}")
        return 1
    print(
        f"{trace.source}: {replayed.num_calls:,} calls on {kind}, {replayed.num_scripts:,} of"
        f" scripts; all replies are equal, and invariants hold at {replayed.num_checked:,} calls"
    )
    return 0
