"""Checks promises about time. Most of them hold only in worlds without faults, or after the last
fault.

Other modules check the other promises: `tests/programs/chaos/audit`, `causes.py` and `watch.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from promptq.producer.clients.resumable_stream import SILENCE_SECONDS
from promptq.worker.leases.coalescer import LONGEST_SECONDS
from tests.programs.chaos.audit.auditor import Snapshot, Violation
from tests.programs.chaos.audit.records import Kind, Seen, Sent
from tests.programs.simulation.loop import EPOCH
from tests.programs.simulation.notes import Notes, Request, Step
from tests.programs.simulation.plan import OF_SERVER, Fault

PATIENCE_SECONDS = 10.0
"""Seconds within which all requests end after the faults, and within which workers drain."""

_MOST_SECONDS_UNSEEN = 0.5
"""Seconds after which a subscriber has seen an end, or a token of the engine."""
_MOST_SECONDS_OF_CANCEL = 0.25
_MOST_SECONDS_OF_WORK = 0.25
"""Seconds after a request's end during which an engine may still generate tokens of it."""
_MOST_SECONDS_TO_START = 0.5
"""Seconds until the first token of a request while the workers have nothing else to do, beyond the
time for which claims leave requests to other workers."""
_RECOVERY_SECONDS = {
    **dict.fromkeys((Fault.CUT, Fault.CUT_ONE, Fault.LOSE_REPLY), 1.0),
    Fault.LOSE_MESSAGES: SILENCE_SECONDS + 1.0,
    **dict.fromkeys((Fault.HOLD, Fault.REFUSE, Fault.FREEZE_CLIENT, *OF_SERVER), 5.0),
}
"""Seconds after a fault until a subscriber listens again: it tries again after 4 s at most."""
_EVENTS_AT_ONCE = 2
"""The end, and one event that was due already. The first token after a preemption is another."""


@dataclass(slots=True)
class Stream:
    """A subscriber's record of one stream. Times are the world's, in seconds."""

    seen: Seen
    began_at: float
    times: list[float] = field(default_factory=list)
    """When the subscriber saw each event."""
    ended_at: float | None = None
    is_cut_off: bool = False
    """Whether its process was killed before the end."""


def lives(snapshot: Snapshot) -> dict[str, Request]:
    """Returns the history of each request on the server, by request id."""
    return {
        request_id: Request(
            request_id,
            _seconds(record.get("enqueued_at")) or 0.0,
            _seconds(record.get("first_token_at")),
            _seconds(record.get("finished_at")),
            record,
        )
        for request_id, record in snapshot.requests.items()
    }


def _seconds(unix_ms: str | None) -> float | None:
    return None if unix_ms is None else int(unix_ms) / 1000 - EPOCH


def check_times(
    notes: Notes,
    requests: Mapping[str, Request],
    sent: Iterable[Sent],
    streams: Iterable[Stream],
    affinity_ms: int = 0,
) -> Iterator[Violation]:
    """Yields violations of these promises: leases last long enough, and ends, tokens, cancels and
    starts come soon enough."""
    calm = {
        request_id: request
        for request_id, request in requests.items()
        if notes.is_calm(request.enqueued_at)
    }
    for request in calm.values():
        num_given_back = sum(past["how"] == "given back" for past in request.attempts)
        if int(request.record.get("attempt", 1)) > 1 + num_given_back:
            what = f"attempt {request.record['attempt']}, without a fault"
            yield Violation("lost lease", request.request_id, what)
        yield from _check_work(request, notes.steps[request.request_id])
    sent = list(sent)
    may_stop = {request.request_id for request in sent if "stop" in request.fields}
    for stream in streams:
        if (ended := requests.get(stream.seen.request_id)) is not None:
            yield from _check_end(stream, ended, notes)
        if (found := calm.get(stream.seen.request_id)) is not None:
            yield from _check_stream(stream, found, notes.steps[found.request_id])
            if found.request_id not in may_stop:  # their tokens are never delayed
                yield from _check_rate(stream, notes)
    for cancelled, at in notes.cancels:
        found = calm.get(cancelled.request_id)
        if found and found.finished_at and found.finished_at > at + _MOST_SECONDS_OF_CANCEL:
            what = f"it runs for {found.finished_at - at:.3f} s"
            yield Violation("late cancel", found.request_id, what)
    most_seconds = _MOST_SECONDS_TO_START + affinity_ms / 1000
    yield from _check_starts(calm, requests.values(), sent, most_seconds)


def _check_work(request: Request, steps: Sequence[Step]) -> Iterator[Violation]:
    """Checks that no engine works on a request that has ended."""
    if steps and request.finished_at is not None:
        seconds = steps[-1].at - request.finished_at
        if seconds > _MOST_SECONDS_OF_WORK:
            what = f"{steps[-1].worker} works on it {seconds:.3f} s after its end"
            yield Violation("useless work", request.request_id, what)


def _check_stream(stream: Stream, request: Request, steps: Sequence[Step]) -> Iterator[Violation]:
    """Checks that a subscriber sees each token soon after a step has generated it."""
    made_at: list[float] = []
    for step in steps:
        if step.begins:  # this attempt generates again the tokens that the last one did not send
            del made_at[step.num_tokens - 1 :]
        made_at += [step.at] * (step.num_tokens - len(made_at))
    for event, seen_at in zip(stream.seen.events, stream.times, strict=True):
        if event.token_ids and event.index < len(made_at):
            seconds = seen_at - max(made_at[event.index], stream.began_at)
            if seconds > _MOST_SECONDS_UNSEEN:
                what = f"a subscriber sees token {event.index} {seconds:.3f} s late"
                yield Violation("late token", request.request_id, what)
                break


def _check_end(stream: Stream, request: Request, notes: Notes) -> Iterator[Violation]:
    """Checks that a subscriber sees the end soon, unless a fault disturbs its connection."""
    if stream.ended_at is None or request.finished_at is None:
        return
    ended_at = max(request.finished_at, stream.began_at)
    seconds = stream.ended_at - ended_at
    if seconds > _MOST_SECONDS_UNSEEN and not any(
        fault.begin <= stream.ended_at
        and fault.end + _RECOVERY_SECONDS[fault.kind] >= ended_at
        and (fault.kind in OF_SERVER or stream.seen.subscriber.startswith(f"{fault.process}-"))
        for fault in notes.disturbances
        if fault.kind in _RECOVERY_SECONDS
    ):
        what = f"{stream.seen.subscriber} sees it {seconds:.3f} s late"
        yield Violation("late end", request.request_id, what)


def _check_rate(stream: Stream, notes: Notes) -> Iterator[Violation]:
    """Checks that a worker with a limit puts tokens of several steps into an event."""
    request_id = stream.seen.request_id
    steps = notes.steps[request_id]
    if not steps or stream.times[:1] > [steps[0].at + _MOST_SECONDS_UNSEEN]:
        return
    workers = {step.worker for step in steps}
    limit = max(1 / LONGEST_SECONDS, *(notes.events_per_second[worker] for worker in workers))
    seconds = steps[-1].at - steps[0].at
    num_events = sum(bool(event.token_ids) for event in stream.seen.events)
    num_at_once = _EVENTS_AT_ONCE * len(workers) + sum(step.begins for step in steps)
    if num_events > num_at_once + limit * seconds:
        what = f"{num_events} events in {seconds:.3f} s, above the limit of {limit:g} a second"
        yield Violation("too many events", request_id, what)


def _check_starts(
    calm: Mapping[str, Request],
    requests: Iterable[Request],
    sent: Iterable[Sent],
    most_seconds: float,
) -> Iterator[Violation]:
    """Checks that a worker without other requests begins a new one soon."""
    all_requests = list(requests)
    for request in sent:
        found = calm.get(request.request_id)
        if found is None or request.delay_ms or found.first_token_at is None:
            continue
        if any(
            other.enqueued_at <= found.first_token_at
            and (other.finished_at is None or other.finished_at >= found.enqueued_at)
            for other in all_requests
            if other is not found
        ):
            continue
        seconds = found.first_token_at - found.enqueued_at
        if seconds > most_seconds:
            what = f"its first token comes after {seconds:.3f} s, and nothing else runs"
            yield Violation("late start", found.request_id, what)


def is_cancelled_while_it_runs(request: Sent) -> bool:
    """Returns whether the request's first answered cancel set the flag while a worker held the
    request."""
    return request.kind is Kind.CANCEL and request.cancel_status == "flagged"


def num_carried_on(streams: Iterable[Stream]) -> int:
    """Returns the number of streams with events of several attempts."""
    return sum(len({event.attempt for event in stream.seen.events}) > 1 for stream in streams)
