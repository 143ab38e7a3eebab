"""For each promise about time, causes and load, a record that breaks the promise is found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from promptq.shared.protocol.keys import Keys
from tests.programs.chaos.audit.auditor import Snapshot
from tests.programs.chaos.audit.records import Claimed, Kind, Queue, Seen, SeenEvent, Sent
from tests.programs.simulation.auditor import Stream, check_times, lives
from tests.programs.simulation.causes import check_causes
from tests.programs.simulation.loop import EPOCH, Process, SimulatedLoop
from tests.programs.simulation.notes import (
    Claim,
    Disturbance,
    Drain,
    DueClaim,
    Notes,
    Script,
    Step,
)
from tests.programs.simulation.patience_audit import check_patience
from tests.programs.simulation.plan import Fault
from tests.programs.simulation.watch import (
    Watch,
    check_given_back,
    check_idle,
    check_listed,
    check_statistics,
)

WORKER = "worker-1.1"


def unix_ms(at: float) -> str:
    return str(round((EPOCH + at) * 1000))


@dataclass
class Story:
    """The records of a request of two tokens from 1.0 to 1.2 s, with one worker and one subscriber.

    The world has no faults.
    """

    notes: Notes = field(default_factory=lambda: Notes(calm_from=0.0))
    record: dict[str, Any] = field(
        default_factory=lambda: {
            "attempt": "1",
            "enqueued_at": unix_ms(1.0),
            "first_token_at": unix_ms(1.1),
            "finished_at": unix_ms(1.2),
        }
    )

    def __post_init__(self) -> None:
        self.sent = Sent("r", Queue.VOLUME, Kind.CANCEL, {})
        events = [SeenEvent(0, [1], "a"), SeenEvent(1, [2], "b", "length")]
        seen = Seen("client-1-first", "r", events)
        self.stream = Stream(seen, began_at=1.0, times=[1.1, 1.2], ended_at=1.2)
        self.notes.steps["r"] = [Step(WORKER, 1.1, 1, begins=True), Step(WORKER, 1.19, 2)]
        self.notes.events_per_second[WORKER] = 20.0

    def rules(self, lease_ms: int = 1000) -> set[str]:
        requests = lives(Snapshot({"r": self.record}))
        found = [
            *check_times(self.notes, requests, [self.sent], [self.stream]),
            *check_causes(self.notes, requests, lease_ms),
        ]
        return {violation.rule for violation in found}

    def ends_an_attempt(self, how: str, at: float) -> None:
        """Change the records: attempt 1 ends after one token at the time `at`, and attempt 2
        follows."""
        self.notes.calm_from = None
        begin, end = int(unix_ms(1.0)), int(unix_ms(at))
        attempt = {"attempt": 1, "how": how, "worker": f"{WORKER}-7-0a1b2c"}
        self.record["history"] = [{**attempt, "claimed_at": begin, "ended_at": end}]
        for number, claimed_at in ((1, 1.0), (2, at)):
            claimed = Claimed("r", number, number - 1)
            self.notes.claims.append(Claim(f"worker-{number}.1", claimed_at, claimed))


def test_a_request_that_is_served_at_once_breaks_nothing() -> None:
    assert Story().rules() == set()


def test_finds_a_second_attempt_without_a_fault() -> None:
    story = Story()
    story.record["attempt"] = "2"
    assert story.rules() == {"lost lease"}
    story.notes.calm_from = 1.5
    assert story.rules() == set()


def test_finds_an_engine_that_works_on() -> None:
    story = Story()
    story.notes.steps["r"].append(Step(WORKER, 1.46, 3))
    assert story.rules() == {"useless work"}


def test_finds_a_token_that_comes_late() -> None:
    story = Story()
    story.stream.times[0] = 1.61
    assert story.rules() == {"late token"}
    story.notes.steps["r"].insert(1, Step(WORKER, 1.15, 1, begins=True))
    assert story.rules() == set(), "the first attempt has not sent its token"
    story.stream.began_at = 1.2
    assert story.rules() == set()


def test_finds_an_end_that_comes_late() -> None:
    story = Story()
    story.stream.ended_at = 1.71
    assert story.rules() == {"late end"}
    story.notes.calm_from = None
    story.notes.disturbances.append(Disturbance(Fault.CUT_ONE, "client-2", 1.3, 1.3))
    story.notes.disturbances.append(Disturbance(Fault.CUT_ONE, "client-1", 0.1, 0.1))
    assert story.rules() == {"late end"}
    story.notes.disturbances.append(Disturbance(Fault.CUT_ONE, "client-1", 0.3, 0.3))
    assert story.rules() == set()


def test_finds_a_cancel_that_comes_late() -> None:
    story = Story()
    story.notes.cancels.append((story.sent, 0.96))
    assert story.rules() == set()
    story.notes.cancels.append((story.sent, 0.94))
    assert story.rules() == {"late cancel"}


def test_finds_a_start_that_comes_late() -> None:
    story = Story()
    story.record["enqueued_at"] = unix_ms(0.55)
    assert story.rules() == {"late start"}


def test_finds_more_events_than_the_limit_allows() -> None:
    story = Story()
    events = [SeenEvent(number, [number], "a") for number in range(5)]
    story.stream.seen.events[:], story.stream.times[:] = events, [1.19] * 5
    assert story.rules() == {"too many events"}
    story.notes.steps["r"].insert(1, Step(WORKER, 1.15, 1, begins=True))  # after a preemption
    assert story.rules() == set()
    del story.notes.steps["r"][1]
    story.notes.events_per_second[WORKER] = 100.0
    assert story.rules() == set()


def test_finds_a_crash_that_no_fault_explains() -> None:
    story = Story()
    story.ends_an_attempt("crashed", 2.1)
    assert story.rules() == {"crash without a cause"}
    story.notes.disturbances.append(Disturbance(Fault.KILL, "worker-2.1", 1.5, 1.5))
    story.notes.disturbances.append(Disturbance(Fault.LOSE_REPLY, WORKER, 1.5, 1.5))
    assert story.rules() == {"crash without a cause"}
    story.notes.disturbances.append(Disturbance(Fault.KILL, WORKER, 1.5, 1.5))
    assert story.rules() == set()


def test_an_outage_of_the_server_explains_the_end_of_short_leases_alone() -> None:
    story = Story()
    story.ends_an_attempt("crashed", 2.1)
    story.notes.disturbances.append(Disturbance(Fault.RESTART, "server", 1.5, 1.6))
    assert story.rules(lease_ms=1000) == set()
    assert story.rules(lease_ms=4000) == {"crash without a cause"}


def test_finds_a_request_that_is_given_back_before_its_end() -> None:
    story = Story()
    story.ends_an_attempt("given back", 1.15)
    assert story.rules() == {"interrupted"}
    story.notes.drains[WORKER] = Drain(0.1, 1.1)
    assert story.rules() == {"interrupted"}
    story.notes.drains[WORKER] = Drain(0.1, 1.04)
    assert story.rules() == set()


def test_finds_a_claim_in_a_drain() -> None:
    story = Story()
    story.ends_an_attempt("its claim was lost", 1.15)
    story.notes.drains["worker-2.1"] = Drain(20.0, 1.0)
    assert story.rules() == {"claim in a drain"}


def test_finds_a_worker_that_ignores_the_end_of_an_attempt() -> None:
    story = Story()
    story.notes.useless_rows.append(("r", "fence"))
    assert story.rules() == {"ignored answer"}


def test_finds_a_claim_that_comes_late_after_a_message() -> None:
    story = Story()
    story.notes.due_claims.append(DueClaim(WORKER, 1.0, 1.0005, num_workers=1))
    story.notes.due_claims.append(DueClaim(WORKER, 1.0, 1.0055, num_workers=6))
    assert story.rules() == set()
    story.notes.due_claims.append(DueClaim(WORKER, 1.1, 1.1055, num_workers=5))
    assert story.rules() == {"late claim"}
    story.notes.disturbances.append(Disturbance(Fault.FREEZE, WORKER, 1.0, 1.11))
    assert story.rules() == set()


class Server:
    """Answers the commands of a watch as a server would, with one lease until `lease_until`."""

    def __init__(self) -> None:
        self.lease_until: float | None = None
        self.waiting: list[bytes] = []
        self.batch: tuple[bytes, bytes] | tuple[None, None] = (None, None)
        self.channels: list[bytes] = []
        self.num_finished = 3

    def ask(self, *commands: tuple[str | int, ...]) -> list[Any]:
        until = self.lease_until
        leases = [] if until is None else [b"r", unix_ms(until).encode()]
        answers: dict[str | int, Any] = {
            "HMGET": self.batch,
            "PUBSUB": self.channels,
            "HGET": b"%d" % self.num_finished,
            "XRANGE": [(b"1-0", [b"finished", b"1"])],
        }

        def answer(command: tuple[str | int, ...]) -> Any:
            if command[0] != "ZRANGE":
                return answers[command[0]]
            if command[1] == Keys(Queue.VOLUME).pending:
                return self.waiting
            return leases if command[-1] == "WITHSCORES" else leases[:1]

        return [answer(command) for command in commands]


NO_CALLS: dict[str, Counter[Process]] = {"connections": Counter(), "refused scripts": Counter()}


@dataclass(frozen=True)
class Named:
    """Stands for a simulated process: has only a name."""

    name: str


def worker(**fields: Any) -> Any:
    """Returns the parts of a worker that a watch looks at."""
    idle = {"num_held": 0, "most_held": 20, "has_room": True, "running": set()}
    idle |= {"has_unanswered_claim": False}
    served = {"is_serving": True, "worker_id": "w", "ready_at": 2.0, "process": Named(WORKER)}
    return SimpleNamespace(**{**served, **idle, **fields})


def look(watch: Watch, now: float, *workers: Any, is_calm: bool = True, **more: Any) -> None:
    """Call `look` of a watch with these workers. By default, the world is calm (has no faults)."""
    facts = {"processes": [], "calls": NO_CALLS, "is_quiet": is_calm, **more}
    watch.look(now, workers, is_calm=is_calm, **facts)


def test_finds_a_lease_that_is_renewed_too_late() -> None:
    server = Server()
    watch = Watch(server.ask, 1000)
    server.lease_until = 2.6
    look(watch, 2.0)
    look(watch, 2.2, is_calm=False)
    assert not watch.violations
    look(watch, 2.2)
    assert list(watch.violations) == [("late renewal", "r")]


def test_finds_a_client_that_stays_subscribed() -> None:
    server = Server()
    watch = Watch(server.ask, 1000)
    server.channels = [Keys(Queue.VOLUME).events("r").encode()]
    for now in (2.0, 2.5):
        look(watch, now)
    assert not watch.violations
    look(watch, 2.6)
    assert list(watch.violations) == [("still subscribed", "r")]


def test_finds_a_request_that_waits_beside_a_worker_with_room() -> None:
    server = Server()
    watch = Watch(server.ask, 1000)
    server.waiting = [b"r"]
    look(watch, 2.0, worker(), is_calm=False)
    look(watch, 2.31, worker())
    look(watch, 2.5, worker(has_room=False))
    look(watch, 2.6, worker())
    look(watch, 2.94, worker())
    assert not watch.violations
    look(watch, 2.96, worker())
    assert list(watch.violations) == [("idle", "r")]


def test_finds_a_worker_that_never_polls_when_messages_are_lost() -> None:
    server = Server()
    watch = Watch(server.ask, 1000)
    server.waiting = [b"r"]
    for now in (2.0, 3.34):
        look(watch, now, worker(), is_calm=False, is_quiet=True)
    assert not watch.violations
    look(watch, 3.36, worker(), is_calm=False, is_quiet=True)
    assert list(watch.violations) == [("idle", "r")]


def test_finds_a_heartbeat_without_a_request_that_runs() -> None:
    server = Server()
    watch = Watch(server.ask, 1000)
    server.batch = unix_ms(2.3).encode(), b"[]"
    for now in (2.1, 2.4):
        look(watch, now, worker(running={"r"}))
    assert not watch.violations
    server.batch = unix_ms(2.4).encode(), b'[{"request_id": "r"}]'
    look(watch, 2.5, worker(running={"r"}))
    assert not watch.violations
    server.batch = unix_ms(2.4).encode(), b"[]"
    look(watch, 2.6, worker(running={"r"}))
    assert list(watch.violations) == [("stale batch", "r")]


def test_finds_a_worker_that_holds_too_much() -> None:
    watch = Watch(Server().ask, 1000)
    look(watch, 2.0, worker(num_held=20))
    assert not watch.violations
    look(watch, 2.1, worker(num_held=21))
    assert list(watch.violations) == [("holds too much", WORKER)]


def test_finds_processes_that_spin_connect_or_repeat_refused_calls_without_end() -> None:
    loop = SimulatedLoop("1", 1)
    watch, root = Watch(Server().ask, 1000), loop.root
    calls = {"connections": Counter({root: 1000}), "refused scripts": Counter({root: 100})}
    root.num_callbacks = 5000
    look(watch, 0.1, processes=[root], is_calm=False)
    look(watch, 0.2, worker(process=root), processes=[root], calls=calls, is_calm=False)
    assert not watch.violations
    root.num_callbacks = 10_001
    calls["connections"][root] += 1
    look(watch, 0.3, processes=[root], calls=calls, is_calm=False)
    assert list(watch.violations) == [("spins", "world"), ("hammers", "world")]
    watch.violations.clear()
    calls["connections"][root] = 0
    calls["refused scripts"][root] += 1
    look(watch, 0.4, worker(process=root), calls=calls, is_calm=False)
    loop.close()
    assert list(watch.violations) == [("hammers", "world")]


def test_finds_a_lease_that_a_worker_left_behind() -> None:
    server = Server()
    assert not list(check_given_back(server.ask, worker()))
    server.lease_until = 3.0
    assert not list(check_given_back(server.ask, worker(worker_id="other")))
    [violation] = check_given_back(server.ask, worker(worker_id="3"))
    assert violation.rule == "left behind"
    [violation] = check_given_back(server.ask, worker(has_unanswered_claim=True))
    assert violation.rule == "left behind"


def test_finds_a_reaping_right_after_the_server_was_silent() -> None:
    notes = Notes()

    def reaps(at: float) -> list[str]:
        times = ("renew", 1.0), ("heartbeat", 1.5), ("heartbeat", 2.1), ("reap", at)
        scripts = [Script(WORKER, name, seconds) for name, seconds in times]
        return [violation.rule for violation in check_patience(scripts, notes, lease_ms=1000)]

    assert reaps(2.4) == ["early reap"]
    assert reaps(2.6) == []
    notes.disturbances.append(Disturbance(Fault.HOLD, WORKER, 1.4, 2.2))
    assert reaps(2.4) == []


def test_finds_a_worker_that_stays_listed() -> None:
    server = Server()
    worker: Any = SimpleNamespace(worker_id="w", process=SimpleNamespace(name=WORKER))
    server.lease_until = 3.0  # the answer to ZRANGE has the name r
    assert list(check_listed(server.ask, [worker])) == []
    worker.worker_id = "r"
    [violation] = check_listed(server.ask, [worker])
    assert violation.rule == "still listed"


def test_finds_what_stays_after_all_ends() -> None:
    server = Server()
    assert list(check_idle(server.ask, {}, [])) == []
    assert list(check_statistics(server.ask, num_finished=4)) == []
    server.channels, server.num_finished = [b"events:r"], 4
    found = [*check_idle(server.ask, {}, []), *check_statistics(server.ask, num_finished=4)]
    assert [violation.rule for violation in found] == ["still subscribed", "wrong statistics"]
