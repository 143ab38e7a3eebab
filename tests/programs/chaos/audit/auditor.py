"""Compares the records of subscribers and the server's state with the promises of promptq.

The auditor does no I/O. Its input is the records of a run. Its output is violations, each with the
request id and the evidence. `outcome.py` reads the server.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.programs.chaos.audit.records import (
    ALLOWED,
    Claimed,
    Ending,
    Expected,
    Kind,
    Logprob,
    Queue,
    Seen,
    Sent,
)
from tests.programs.chaos.processes.fleet import LEASE_MS

FINAL_STATES = {"completed", "failed", "cancelled", "expired", "dead"}
_HOLDS = {"pending", "leases", "deadlines", "delayed"}
_PER_QUEUE = {
    *("config", "model", "outputs", "statistics:guesses", "workers", "workers:overflow"),
    *("dead", "tenants"),
}
"""Keys of which each queue has one."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was broken."""

    rule: str
    request_id: str
    seen: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.request_id or '(no request)'}: {self.seen}"


@dataclass(slots=True)
class Snapshot:
    """The contents of one queue on the server at the end."""

    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Each request's hash, with `result` as a dict."""
    keys: dict[str, int] = field(default_factory=dict)
    """Milliseconds until each key expires, by its name after the queue's prefix; -1: never."""
    holds: dict[str, list[str]] = field(default_factory=dict)
    """Ids in the sorted sets that hold requests by state."""
    workers: list[dict[str, Any]] = field(default_factory=list)
    """The last heartbeat of each living worker, from the time after all requests had ended."""
    silent: list[str] = field(default_factory=list)
    """Workers of this queue without such a heartbeat."""


def audit(
    sent: Iterable[Sent],
    seen: Iterable[Seen],
    snapshots: dict[Queue, Snapshot],
    references: dict[str, Expected],
    claimed: Iterable[Claimed] = (),
) -> Iterator[Violation]:
    """Yields every violation of a run that is over. `seen` is read once, stream by stream."""
    claims: defaultdict[str, list[Claimed]] = defaultdict(list)
    for claim in claimed:
        claims[claim.request_id].append(claim)
    requests: dict[str, Sent] = {}
    known: dict[Queue, set[str]] = {queue: set() for queue in snapshots}
    for request in sent:
        requests[request.request_id] = request
        known[request.queue].add(request.request_id)
        state = snapshots[request.queue].requests.get(request.request_id, {})
        yield from _check_sending(request)
        yield from _check_end(request, state)
        yield from _check_attempts(request, state, claims[request.request_id])
        if result := state.get("result"):
            expected = request.expected(references)
            yield from _check_tokens(None, result["token_ids"], result["text"], expected, request)
            yield from _check_logprobs(
                *("the server's result", 0, result["token_ids"], _logprobs(result)),
                *(expected, request),
            )
    unseen = set(requests)
    for stream in seen:
        unseen.discard(stream.request_id)
        yield from check_stream(stream, claims[stream.request_id])
        if found := requests.get(stream.request_id):
            expected = found.expected(references)
            yield from _check_tokens(stream, stream.token_ids, stream.text, expected, found)
            for event in stream.events:
                yield from _check_logprobs(
                    *(stream.subscriber, event.index, event.token_ids, event.logprobs or []),
                    *(expected, found),
                )
            yield from _check_same(stream, snapshots[found.queue].requests.get(stream.request_id))
    for request_id in sorted(unseen):
        yield Violation("unseen", request_id, "no subscriber's record tells of it")
    for queue, snapshot in snapshots.items():
        yield from check_leftovers(queue, snapshot, known[queue])


def check_stream(stream: Seen, claims: Sequence[Claimed] = ()) -> Iterator[Violation]:
    """Checks a stream: no gap, no repeat, no late token of an old attempt, one last event."""
    request_id, who = stream.request_id, stream.subscriber
    if stream.error:
        yield Violation("stream failed", request_id, f"{who}: {stream.error}")
    position, attempt = 0, 0
    for number, event in enumerate(stream.events):
        if event.index != position:
            word = "gap" if event.index > position else "repeat"
            told = f"{who}: event {number} begins at token {event.index} after {position} tokens"
            yield Violation(word, request_id, told)
        position = event.index + len(event.token_ids)
        if event.attempt < attempt:
            told = f"{who}: event {number} is of attempt {event.attempt}, behind one of {attempt}"
            yield Violation("zombie", request_id, told)
        attempt = event.attempt
        for claim in claims:
            is_late = position > claim.num_tokens or event.finish_reason
            if event.attempt < claim.attempt and is_late:
                told = f"{who}: event {number} is of attempt {event.attempt} and brings token"
                told += f" {position}; attempt {claim.attempt} had begun behind {claim.num_tokens}"
                yield Violation("zombie", request_id, told)
    ends = [number for number, event in enumerate(stream.events) if event.finish_reason]
    if len(ends) != 1:
        told = f"{who}: {len(ends)} last events among {len(stream.events)}"
        yield Violation("last event", request_id, told)
    elif ends[0] != len(stream.events) - 1:
        yield Violation("last event", request_id, f"{who}: events follow the last one")


def _check_sending(request: Sent) -> Iterator[Violation]:
    if set(request.answers) != {request.request_id}:
        told = f"its producers were given the ids {request.answers}"
        yield Violation("idempotency", request.request_id, told)


def _check_end(request: Sent, state: dict[str, Any]) -> Iterator[Violation]:
    """Checks that the request ended in the right way."""
    request_id, ended = request.request_id, state.get("state", "nowhere")
    if ended not in FINAL_STATES:
        yield Violation("unfinished", request_id, f"it is {ended}: {_brief(state)}")
        return
    if ended not in _allowed_states(request):
        told = f"{request.kind} request ended as {ended}: {_brief(state)}"
        yield Violation("wrong end", request_id, told)
    lived = int(state.get("finished_at", 0)) - int(state.get("enqueued_at", 0))
    if request.kind is Kind.DELAY and lived < request.delay_ms:
        told = f"ended after {lived} ms, which is before its delay of {request.delay_ms}"
        yield Violation("too soon", request_id, told)
    deadline_ms = request.fields.get("deadline_ms")
    if deadline_ms and ended == "completed" and lived > deadline_ms:
        told = f"completed after {lived} ms, behind its deadline of {deadline_ms}"
        yield Violation("deadline", request_id, told)
    if deadline_ms and ended == "expired" and lived < deadline_ms:
        told = f"expired after {lived} ms, before its deadline of {deadline_ms}"
        yield Violation("deadline", request_id, told)


def _check_attempts(
    request: Sent, state: dict[str, Any], claims: Sequence[Claimed]
) -> Iterator[Violation]:
    """Checks that each attempt belonged to one worker, at least for the time of a lease."""
    attempts = sorted(claim.attempt for claim in claims)
    if len(set(attempts)) != len(attempts):
        yield Violation("attempt twice", request.request_id, f"workers were handed {attempts}")
    for past in state.get("history", []):
        held_ms = past["ended_at"] - past["claimed_at"]
        # A server's third break of a request on one worker counts as a crash at once.
        may_be_short = request.queue is Queue.UPSTREAM and past["attempt"] > 2
        if past["how"].startswith("crashed") and held_ms < LEASE_MS and not may_be_short:
            told = f"attempt {past['attempt']} was taken for a crash after {held_ms} ms"
            yield Violation("short lease", request.request_id, told)


def _allowed_states(request: Sent) -> set[str]:
    match request.kind:
        case Kind.POISON:
            return {"dead"}
        case Kind.DEADLINE:
            return {"expired", "completed"}
        case Kind.CANCEL if request.cancel_status in ("cancelled", "flagged"):
            return {"cancelled"}
        case Kind.CANCEL:  # it was over; or a first cancel got through whose reply was lost
            return {"cancelled", "completed"}
    return {"completed"}


def _check_tokens(
    stream: Seen | None, token_ids: list[int], text: str, expected: Expected, request: Sent
) -> Iterator[Violation]:
    """Checks that a completed request has all expected tokens, and others a beginning of them."""
    who = stream.subscriber if stream else "the server's result"
    request_id = request.request_id
    wrong = _first_difference(token_ids, expected.token_ids)
    if wrong is not None:
        told = f"{who}: token {wrong} is {token_ids[wrong : wrong + 3]} ..."
        told += f", not {expected.token_ids[wrong : wrong + 3]} ..."
        yield Violation("changed token", request_id, told)
    elif not expected.text.startswith(text):
        yield Violation("changed text", request_id, f"{who}: {text[-40:]!r} is no part of it")
    if stream is None or not stream.events:
        return
    reason = stream.events[-1].finish_reason
    if reason in ("stop", "length"):
        if expected.finish_reason not in (reason, ""):
            told = f"{who}: {reason}, not {expected.finish_reason}"
            yield Violation("finish reason", request_id, told)
        if len(token_ids) < len(expected.token_ids) or len(text) < len(expected.text):
            told = f"{who}: {len(token_ids)} of {len(expected.token_ids)} tokens"
            yield Violation("cut short", request_id, told)


def _check_logprobs(
    who: str,
    index: int,
    token_ids: list[int],
    logprobs: Sequence[Logprob],
    expected: Expected,
    request: Sent,
) -> Iterator[Violation]:
    """Checks the log-probabilities from the request's token `index` on: one each, if requested."""
    asked = request.fields.get("logprobs") is not None
    named = [token_id for token_id, _, _ in logprobs]
    if named != (token_ids if asked else []):
        told = f"{who}: at token {index} those of {named} came with the tokens {token_ids}"
        yield Violation("logprobs", request.request_id, told)
        return
    for position, found in enumerate(logprobs, index):
        wanted = (expected.logprobs or [])[position : position + 1]
        if wanted and (abs(found[1] - wanted[0][1]) > _ROUNDING or found[2] != wanted[0][2]):
            told = f"{who}: token {position} has {tuple(found)}, not {tuple(wanted[0])}"
            yield Violation("logprobs", request.request_id, told)
            return


_ROUNDING = 1e-3
"""The difference between a step alone and a step with other sequences, in fp32."""


def _logprobs(result: dict[str, Any]) -> list[Logprob]:
    return [(it["token_id"], it["logprob"], it["rank"]) for it in result.get("logprobs") or ()]


def _rounded(logprobs: Sequence[Logprob]) -> list[tuple[int, str, int]]:
    """Rounds to nine digits, enough for all fp32 numbers: the scripts write only fourteen."""
    return [(token_id, f"{value:.9g}", rank) for token_id, value, rank in logprobs]


def _first_difference(token_ids: list[int], expected: list[int]) -> int | None:
    for position, token_id in enumerate(token_ids):
        if position >= len(expected) or token_id != expected[position]:
            return position
    return None


def _check_same(stream: Seen, state: dict[str, Any] | None) -> Iterator[Violation]:
    """Checks that a subscriber that saw the end saw the result that the server keeps."""
    result = (state or {}).get("result")
    if not result or not stream.events or not stream.events[-1].finish_reason:
        return
    reason = stream.events[-1].finish_reason
    seen = (stream.token_ids, stream.text, reason, _rounded(stream.logprobs))
    logprobs = _rounded(_logprobs(result))
    kept = (result["token_ids"], result["text"], result["finish_reason"], logprobs)
    if seen != kept:
        told = f"{stream.subscriber}: {len(seen[0])} tokens, {seen[2]}, {len(seen[3])} logprobs;"
        told += f" the server's result has {len(kept[0])}, {kept[2]}, {len(kept[3])}"
        yield Violation("not the result", stream.request_id, told)


def check_leftovers(queue: Queue, snapshot: Snapshot, known: set[str]) -> Iterator[Violation]:
    """Checks that no request is held any longer, and that all kept keys expire."""
    for name, ids in snapshot.holds.items():
        for request_id in ids:
            yield Violation(f"left in {name}", request_id, f"queue {queue}")
    for name, ttl_ms in snapshot.keys.items():
        first, _, rest = name.partition(":")
        if name in _PER_QUEUE or first in _HOLDS:
            continue  # the holds are checked above
        if first == "request" and rest not in known:
            yield Violation("leaked key", rest, f"{name} of a request that nobody sent")
        elif ttl_ms < 0 and snapshot.requests.get(rest, {}).get("state") != "dead":
            yield Violation("leaked key", rest, f"{name} lives for ever")
    for worker in snapshot.workers:
        in_use = {name: worker.get(name) for name in _IN_USE if worker.get(name) != "0"}
        if in_use:
            yield Violation("leaked block", "", f"worker {worker['worker_id']} idles with {in_use}")
    for name in snapshot.silent:
        yield Violation("leaked block", "", f"worker {name} of {queue} does not tell that it idles")


_IN_USE = ("kv_used_tokens", "num_running", "num_waiting", "num_prefetched")


def check_endings(endings: Iterable[Ending]) -> Iterator[Violation]:
    """Checks that each worker ended only because of the run's faults, and in the right way."""
    for ending in endings:
        if ending.reason not in ALLOWED:
            told = f"a worker of {ending.queue} ended {ending.reason}: {ending.last_words}"
            yield Violation("bad exit", "", told)


def check_refusals(told: Iterable[str]) -> Iterator[Violation]:
    """Checks that the access rules allowed every command of every role. `told` are the refused
    commands."""
    for refusal in told:
        yield Violation("refused", "", refusal)


def _brief(state: dict[str, Any]) -> str:
    told = {name: value for name, value in state.items() if name not in ("payload", "result")}
    return str(told)[:400]
