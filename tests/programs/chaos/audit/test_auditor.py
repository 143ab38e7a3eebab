"""The tests break each rule of the auditor once, and the auditor must report this rule. A run
without fault passes."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from promptq.shared.protocol.keys import Keys
from tests.programs.chaos.audit.auditor import (
    Snapshot,
    Violation,
    audit,
    check_endings,
    check_refusals,
)
from tests.programs.chaos.audit.outcome import Outcome, take_snapshot, told_since
from tests.programs.chaos.audit.records import (
    Claimed,
    Ending,
    Expected,
    Kind,
    Queue,
    Seen,
    SeenEvent,
    Sent,
)
from tests.programs.chaos.processes.chaotic_worker import POISONED_CODE
from tests.programs.chaos.processes.fleet import LEASE_MS
from tests.programs.chaos.processes.group import ProcessGroup
from tests.programs.chaos.processes.server import PersistentServer
from tests.support.roles import as_role, forget_refusals, refusals

SEED, LENGTH = 5, 12
PREFIX_LENGTH = 7
IN_USE = ["kv_used_tokens", "num_running", "num_waiting", "num_prefetched"]


@dataclass
class Story:
    """The records of one request: the producer's, one subscriber's and the server's."""

    sent: Sent
    seen: Seen
    snapshot: Snapshot
    references: dict[str, Expected] = field(default_factory=dict)
    claimed: list[Claimed] = field(default_factory=list)

    @property
    def state(self) -> dict[str, Any]:
        return self.snapshot.requests["r"]

    def violations(self) -> list[Violation]:
        snapshots = {self.sent.queue: self.snapshot}
        return list(audit([self.sent], [self.seen], snapshots, self.references, self.claimed))

    def rules(self) -> set[str]:
        found = self.violations()
        assert all(violation.seen for violation in found)
        return {violation.rule for violation in found}


def story(kind: Kind = Kind.PLAIN, num_tokens: int = LENGTH, **fields: Any) -> Story:
    """Returns the records of a request that got `num_tokens` tokens in events of three, and then
    ended."""
    fields = {"prompt": "a", "seed": SEED, "max_tokens": LENGTH} | fields
    sent = Sent("r", Queue.VOLUME, kind, fields, answers=["r"])
    expected = sent.expected({})
    is_whole = num_tokens >= len(expected.token_ids)
    tokens = expected.token_ids[:num_tokens]
    text = expected.text[: len(tokens)]
    reason = expected.finish_reason if is_whole else "cancelled"
    state = "completed" if is_whole else "cancelled"
    logprobs = expected.logprobs
    events = [
        SeenEvent(
            *(start, tokens[start : start + 3], text[start : start + 3]),
            attempt=1,
            logprobs=None if logprobs is None else logprobs[start : start + 3],
        )
        for start in range(0, len(tokens), 3)
    ]
    events.append(SeenEvent(len(tokens), [], "", reason, 1))
    record = {
        "state": state,
        "enqueued_at": "1000",
        "finished_at": "2000",
        "result": {"token_ids": tokens, "text": text, "finish_reason": reason},
    }
    if logprobs is not None:
        kept = [{"token_id": it, "logprob": 0.0, "rank": 1} for it in tokens]
        record["result"] |= {"logprobs": kept}
    keys = {"request:r": 3_600_000, "tokens:r": 60_000, "config": -1, "outputs": -1, "workers": -1}
    in_use = dict.fromkeys(IN_USE, "0")
    worker = {"worker_id": "w", **in_use}
    return Story(sent, Seen("s", "r", events), Snapshot({"r": record}, keys, {}, [worker]))


def ended(kind: Kind, reason: str, lived_ms: int, **fields: Any) -> Story:
    """Returns the records of a request that was ended early for this `reason`, after `lived_ms`."""
    told = story(kind, PREFIX_LENGTH, **fields)
    told.seen.events[-1].finish_reason = told.state["result"]["finish_reason"] = reason
    told.state["state"] = reason
    told.state["finished_at"] = str(1000 + lived_ms)
    return told


def test_a_run_without_fault_passes() -> None:
    assert story().violations() == []
    assert story(stop="zzz").violations() == []
    assert story(logprobs=1).violations() == []
    cancelled = story(Kind.CANCEL, PREFIX_LENGTH)
    cancelled.sent.cancel_status = "flagged"
    assert cancelled.violations() == []
    assert ended(Kind.DEADLINE, "expired", 600, deadline_ms=500).violations() == []


def test_a_stop_string_ends_the_text_before_it() -> None:
    whole = story().sent.expected({}).text
    told = story(stop=whole[5:7])
    assert told.seen.text == whole[: whole.find(whole[5:7])]
    assert told.violations() == []


def test_finds_a_gap() -> None:
    told = story()
    del told.seen.events[1]
    assert "gap" in told.rules()


def test_finds_a_repeat() -> None:
    told = story()
    told.seen.events.insert(2, told.seen.events[1])
    assert "repeat" in told.rules()


def test_finds_an_earlier_attempt_that_still_speaks() -> None:
    told = story()
    told.seen.events[0].attempt = told.seen.events[2].attempt = 2
    assert told.rules() == {"zombie"}


@pytest.mark.parametrize(("num_tokens", "rules"), [(6, set()), (5, {"zombie"}), (3, {"zombie"})])
def test_finds_an_event_of_an_attempt_that_had_lost_the_request(
    num_tokens: int, rules: set[str]
) -> None:
    told = story()
    for event in told.seen.events[2:]:
        event.attempt = 2
    told.claimed = [Claimed("r", 1, 0), Claimed("r", 2, num_tokens)]
    assert told.rules() == rules


def test_finds_an_end_by_an_attempt_that_had_lost_the_request() -> None:
    told = story()
    told.claimed = [Claimed("r", 1, 0), Claimed("r", 2, LENGTH)]
    assert told.rules() == {"zombie"}
    told.seen.events[-1].attempt = 2
    assert told.violations() == []


def test_finds_an_attempt_that_two_workers_were_handed() -> None:
    told = story()
    told.claimed = [Claimed("r", 1, 0), Claimed("r", 1, 0)]
    assert told.rules() == {"attempt twice"}


@pytest.mark.parametrize(
    ("held_ms", "how", "rules"),
    [
        (LEASE_MS, "crashed", set()),
        (LEASE_MS - 1, "crashed", {"short lease"}),
        (LEASE_MS - 1, "crashed alone", {"short lease"}),
        (5, "given back", set()),
    ],
)
def test_finds_a_lease_that_was_cut_short(held_ms: int, how: str, rules: set[str]) -> None:
    told = story()
    past = {"attempt": 1, "claimed_at": 1000, "ended_at": 1000 + held_ms, "how": how}
    told.state["history"] = [past]
    assert told.rules() == rules


@pytest.mark.parametrize(("attempt", "rules"), [(2, {"short lease"}), (3, set())])
def test_only_the_third_break_of_a_server_may_cut_a_lease_short(
    attempt: int, rules: set[str]
) -> None:
    told = story()
    told.sent.queue = Queue.UPSTREAM
    past = {"attempt": attempt, "claimed_at": 1000, "ended_at": 1005, "how": "crashed"}
    told.state["history"] = [past]
    assert told.rules() == rules


@pytest.mark.parametrize("position", [0, 5, LENGTH - 1])
def test_finds_a_changed_token(position: int) -> None:
    told = story()
    told.seen.events[position // 3].token_ids[position % 3] ^= 1
    assert "changed token" in told.rules()


def test_finds_a_token_too_many() -> None:
    told = story()
    told.seen.events[-1].token_ids.append(97)
    assert "changed token" in told.rules()


def test_finds_a_changed_token_in_the_servers_result() -> None:
    told = story()
    told.state["result"]["token_ids"][4] ^= 1
    assert {"changed token", "not the result"} <= told.rules()


def test_finds_a_changed_text() -> None:
    told = story()
    told.seen.events[1].text = "???"
    assert "changed text" in told.rules()


def test_finds_another_answer_than_the_reference() -> None:
    told = story()
    told.sent.template = "greedy"
    told.references["greedy"] = Expected([1, 2, 3], "abc", "length")
    assert "changed token" in told.rules()


def test_finds_an_answer_that_was_cut_short() -> None:
    told = story()
    told.seen.events[-2:] = [SeenEvent(9, [], "", "length", 1)]
    assert "cut short" in told.rules()


def test_finds_a_wrong_finish_reason() -> None:
    told = story()
    told.seen.events[-1].finish_reason = "stop"
    assert "finish reason" in told.rules()


def test_finds_a_missing_last_event() -> None:
    told = story()
    del told.seen.events[-1]
    assert "last event" in told.rules()


def test_finds_two_last_events() -> None:
    told = story()
    told.seen.events.append(told.seen.events[-1])
    assert "last event" in told.rules()


def test_finds_events_behind_the_last() -> None:
    told = story()
    last = told.seen.events.pop()
    told.seen.events.insert(2, SeenEvent(6, [], "", last.finish_reason, 1))
    assert "last event" in told.rules()


def test_finds_a_stream_that_failed() -> None:
    told = story()
    told.seen.error = "ConnectionError: gone"
    assert "stream failed" in told.rules()


def test_finds_a_request_that_nobody_saw() -> None:
    told = story()
    told.seen.request_id = "other"
    assert "unseen" in told.rules()


@pytest.mark.parametrize("state", ["waiting", "active", None])
def test_finds_a_request_that_did_not_end(state: str | None) -> None:
    told = story()
    if state is None:
        del told.snapshot.requests["r"]
    else:
        told.state["state"] = state
    assert "unfinished" in told.rules()


@pytest.mark.parametrize("state", ["failed", "dead", "cancelled", "expired"])
def test_finds_a_plain_request_that_was_not_completed(state: str) -> None:
    told = story()
    told.state["state"] = state
    assert "wrong end" in told.rules()


@pytest.mark.parametrize("status", ["cancelled", "flagged"])
def test_finds_a_cancelled_request_that_was_completed(status: str) -> None:
    told = story(Kind.CANCEL)
    told.sent.cancel_status = "finished"
    assert told.violations() == []
    told.sent.cancel_status = status
    assert "wrong end" in told.rules()


def test_finds_a_cancelled_request_with_another_beginning() -> None:
    told = ended(Kind.CANCEL, "cancelled", 500)
    told.sent.cancel_status = "cancelled"
    assert told.violations() == []
    told.seen.events[0].token_ids[1] ^= 1
    assert "changed token" in told.rules()


def test_finds_a_completion_behind_the_deadline() -> None:
    told = story(Kind.DEADLINE, deadline_ms=1000)
    assert told.violations() == []
    told.state["finished_at"] = "2001"
    assert "deadline" in told.rules()


def test_finds_an_expiry_before_the_deadline() -> None:
    assert "deadline" in ended(Kind.DEADLINE, "expired", 499, deadline_ms=500).rules()


def test_finds_a_delayed_request_that_ended_too_soon() -> None:
    told = story(Kind.DELAY)
    told.sent.delay_ms = 1000
    assert told.violations() == []
    told.sent.delay_ms = 1001
    assert "too soon" in told.rules()


def test_finds_a_poison_that_is_no_dead_letter() -> None:
    assert "wrong end" in story(Kind.POISON).rules()


def test_finds_two_requests_of_one_idempotency_key() -> None:
    told = story(Kind.TWICE)
    told.sent.answers = ["r", "r"]
    assert told.violations() == []
    told.sent.answers = ["r", "r2"]
    assert "idempotency" in told.rules()


@pytest.mark.parametrize(
    ("name", "ttl_ms"),
    [
        ("request:r", -1),
        ("tokens:r", -1),
        ("request:nobodys", 1000),
        ("idempotency:key", -1),
        ("worker:w", -1),
        ("something:else", -1),
    ],
)
def test_finds_a_leaked_key(name: str, ttl_ms: int) -> None:
    told = story()
    told.snapshot.keys[name] = ttl_ms
    assert told.rules() == {"leaked key"}


def test_keeps_dead_letters_until_somebody_deletes_them() -> None:
    told = ended(Kind.POISON, "error", 500)
    told.state["state"] = "dead"
    told.snapshot.keys["request:r"] = -1
    assert told.violations() == []


@pytest.mark.parametrize("name", ["pending", "leases", "deadlines", "delayed", "pending:tenant"])
def test_finds_a_request_that_is_still_held(name: str) -> None:
    told = story()
    told.snapshot.holds[name] = ["r"]
    assert told.rules() == {f"left in {name}"}


@pytest.mark.parametrize("name", IN_USE)
def test_finds_a_leaked_block(name: str) -> None:
    told = story()
    told.snapshot.workers[0][name] = "16"
    assert told.rules() == {"leaked block"}
    del told.snapshot.workers[0][name]
    assert told.rules() == {"leaked block"}


def test_finds_a_worker_that_does_not_report_its_state(redis_url: str) -> None:
    told = story()
    told.snapshot.silent = ["volume-3"]
    assert told.rules() == {"leaked block"}
    with redis.Redis.from_url(as_role("", redis_url)) as client:
        keys = Keys(Queue.VOLUME)
        stats = {"pid": 7, "heartbeat_at": 1000, "kv_used_tokens": 0}
        client.zadd(keys.workers, {"w": 9000})
        client.hset(keys.worker("w"), mapping=stats)
        snapshot = take_snapshot(client, keys, {"volume-0": 7, "volume-1": 8, "volume-2": None})
        assert [worker["pid"] for worker in snapshot.workers] == ["7"]
        assert snapshot.silent == ["volume-1", "volume-2"]
        assert told_since(client, keys, 999) == {7}
        assert told_since(client, keys, 1000) == set()


@pytest.mark.parametrize(
    "change",
    [
        lambda event: event.logprobs.pop(),
        lambda event: event.logprobs.append(event.logprobs[0]),
        lambda event: event.logprobs.reverse(),
        lambda event: event.logprobs.__setitem__(1, (event.token_ids[1], -0.1, 1)),
        lambda event: event.logprobs.__setitem__(1, (event.token_ids[1], 0.0, 2)),
        lambda event: setattr(event, "logprobs", None),
    ],
    ids=["missing", "twice", "out of order", "another value", "another rank", "none"],
)
def test_finds_wrong_logprobs(change: Callable[[SeenEvent], object]) -> None:
    told = story(logprobs=0)
    change(told.seen.events[1])
    assert told.rules() == {"logprobs", "not the result"}


def test_finds_wrong_logprobs_in_the_servers_result() -> None:
    told = story(logprobs=0)
    told.state["result"]["logprobs"][4]["logprob"] = -1.0
    assert told.rules() == {"logprobs", "not the result"}


def test_a_result_may_have_fewer_digits_than_an_event() -> None:
    told = story(logprobs=0)
    value = -0.000560760498046875
    for event in told.seen.events:
        event.logprobs = [(it, value, 1) for it in event.token_ids]
    for kept in told.state["result"]["logprobs"]:
        kept["logprob"] = float(f"{value:.14g}")
    assert told.violations() == []
    told.state["result"]["logprobs"][2]["logprob"] = value * (1 + 1e-7)
    assert told.rules() == {"not the result"}


def test_finds_logprobs_that_nobody_asked_for() -> None:
    told = story()
    told.seen.events[0].logprobs = [(it, 0.0, 1) for it in told.seen.events[0].token_ids]
    assert told.rules() == {"logprobs", "not the result"}


SIGTERM, SIGKILL = signal.SIGTERM, signal.SIGKILL
NO_SERVER = "promptq worker: no Redis server answers at redis://x: Connection refused"
ALLOWED_ENDS = [
    Ending(Queue.REAL, -9, frozenset({SIGKILL})),
    Ending(Queue.REAL, -9, frozenset({SIGTERM, SIGKILL})),
    Ending(Queue.POISON, POISONED_CODE),
    Ending(Queue.VOLUME, 0, frozenset({SIGTERM})),
    Ending(Queue.VOLUME, 1, was_ready=False, last_words=NO_SERVER),
    Ending(Queue.VOLUME, 0, is_last=True),
    Ending(Queue.VOLUME, -15, frozenset({SIGTERM}), is_earlier=True),
]
BAD_ENDS = [
    Ending(Queue.VOLUME, 1, last_words="RuntimeError: block 3 has 2 references"),
    Ending(Queue.VOLUME, 0),
    Ending(Queue.VOLUME, -9, frozenset({SIGTERM})),
    Ending(Queue.VOLUME, -15, frozenset({SIGTERM})),
    Ending(Queue.VOLUME, -15, is_earlier=True),
    Ending(Queue.VOLUME, -11, frozenset({SIGKILL})),
    Ending(Queue.POISON, 1),
    Ending(Queue.VOLUME, POISONED_CODE),
    Ending(Queue.VOLUME, 1, frozenset({SIGTERM})),
    Ending(Queue.VOLUME, 1, last_words=NO_SERVER),
    Ending(Queue.VOLUME, 1, was_ready=False, last_words="ImportError: no"),
    Ending(Queue.VOLUME, 1, is_last=True),
    Ending(Queue.VOLUME, None, is_last=True),
]


@pytest.mark.parametrize("ending", ALLOWED_ENDS)
def test_allows_the_ends_that_a_run_causes(ending: Ending) -> None:
    assert list(check_endings([ending])) == []


@pytest.mark.parametrize("ending", BAD_ENDS)
def test_finds_a_bad_exit(ending: Ending) -> None:
    [violation] = check_endings([ending])
    assert violation.rule == "bad exit"
    assert ending.last_words in violation.seen


def test_finds_a_refusal(redis_url: str) -> None:
    try:
        with (
            redis.Redis.from_url(as_role("subscriber", redis_url)) as client,
            pytest.raises(redis.exceptions.NoPermissionError),
        ):
            client.flushall()
        [violation] = check_refusals(refusals(redis_url))
    finally:
        forget_refusals(redis_url)
    assert violation.rule == "refused"
    assert "subscriber may not flushall" in violation.seen


def test_finds_a_key_of_no_queue(redis_url: str, tmp_path: Path) -> None:
    outcome = Outcome(0, 0.0)
    server = PersistentServer(tmp_path, ProcessGroup())
    server.port = urlsplit(redis_url).port or 0
    with server.opened() as client:
        outcome.audit(tmp_path, server, {})
        assert outcome.violations == []
        client.set("promptq:astray", 1)
        outcome.audit(tmp_path, server, {})
    assert [str(it) for it in outcome.violations] == [
        "leaked key: (no request): promptq:astray is no queue's"
    ]


def test_any_single_change_to_a_token_is_found() -> None:
    rng = random.Random(3)
    for _ in range(200):
        told = story()
        event = rng.choice(told.seen.events[:-1])
        at = rng.randrange(len(event.token_ids))
        event.token_ids[at] = (event.token_ids[at] + rng.randint(1, 255)) % 256
        assert told.violations()
