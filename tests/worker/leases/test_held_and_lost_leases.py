"""The owner of what a worker holds: each event, what it may follow, and what is counted of it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from promptq.shared.protocol.request import FinishReason
from promptq.shared.protocol.rows import RowStatus
from promptq.worker.leases.held_and_lost_leases import Exit, Outcome
from promptq.worker.leases.lease import Lease, LeaseState
from tests.worker.leases.world import (
    ENDING,
    GONE,
    PREPARING,
    READY,
    RETURNING,
    RUNNING,
    World,
    emitted,
    preparation,
)

SEED, STEPS = 20, 40_000


@pytest.fixture
def world() -> World:
    return World()


def test_a_request_goes_from_its_claim_through_the_engine_to_its_end(world: World) -> None:
    lease = world.claimed()
    assert (len(world.leases), lease.state) == (1, PREPARING)
    world.prepare(lease)
    assert (lease.state, len(world.leases.ready), world.engine.sequences) == (READY, 1, [])
    world.leases.feed()
    sequence_id = lease.prepared.sequence_id
    assert (lease.state, len(world.leases.ready)) == (RUNNING, 0)
    assert world.engine.sequences == [sequence_id]
    assert world.leases.by_sequence(sequence_id) is lease
    world.engine.sequences.clear()  # it has ended there, so that an abort would be a mistake
    world.leases.ending(lease, by_engine=True)
    assert world.leases.by_sequence(sequence_id) is None
    assert world.leases.answered(lease, RowStatus.OK, "stop") is FinishReason.STOP
    assert (lease.state, len(world.leases), world.leases.is_busy) == (GONE, 0, False)


@pytest.mark.parametrize("state", [PREPARING, READY, RUNNING, ENDING, RETURNING])
@pytest.mark.parametrize("status", [RowStatus.CANCELLED, RowStatus.EXPIRED])
def test_what_the_server_ends_is_gone_from_any_state(
    world: World, state: LeaseState, status: RowStatus
) -> None:
    lease = world.in_state(state)
    assert world.leases.answered(lease, status) is FinishReason(status)
    assert (lease.state, len(world.leases), world.engine.sequences) == (GONE, 0, [])
    assert len(world.leases.ready) == 0


@pytest.mark.parametrize("state", [PREPARING, READY, RUNNING, ENDING])
def test_a_request_that_another_worker_has_is_gone_and_reported_once(
    world: World, state: LeaseState
) -> None:
    lease = world.in_state(state)
    assert world.leases.answered(lease, RowStatus.FENCED) is Exit.FENCED
    assert world.leases.answered(lease, RowStatus.FENCED) is None
    assert (lease.state, world.engine.sequences) == (GONE, [])


def test_the_call_that_gives_a_request_back_reports_it(world: World) -> None:
    """A renewal beside it is told that nobody holds it, or that it has ended."""
    lease = world.in_state(RETURNING)
    for status in (RowStatus.FENCED, RowStatus.FINISHED):
        assert world.leases.answered(lease, status) is None
        assert lease.state is RETURNING
    assert world.leases.released(lease, "waiting") is Exit.GIVEN_BACK
    assert lease.state is GONE


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        ("waiting", Exit.GIVEN_BACK),
        ("fenced", Exit.FENCED),
        ("finished", None),
        ("cancelled", FinishReason.CANCELLED),
    ],
)
def test_what_the_server_says_to_a_return(
    world: World, status: str, outcome: Outcome | None
) -> None:
    lease = world.in_state(RETURNING)
    assert world.leases.due_back == [lease]
    assert world.leases.some_return.is_set()
    assert world.leases.released(lease, status) is outcome
    assert (lease.state, world.leases.due_back) == (GONE, [])


def test_who_is_blamed_leaves_as_failed(world: World) -> None:
    lease = world.running()
    world.leases.returning(lease, crashed=True)
    world.leases.returning(lease)
    assert lease.is_blamed, "what was said first counts"
    assert world.leases.released(lease, "dead") is Exit.FAILED


def test_an_end_that_comes_late_is_still_reported(world: World) -> None:
    """Two calls are under way, and the server tells the end to the first that it carries out."""
    lease = world.running()
    assert world.leases.answered(lease, RowStatus.FINISHED) is None
    assert lease.state is GONE
    assert world.leases.answered(lease, RowStatus.CANCELLED) is FinishReason.CANCELLED


def test_a_row_that_was_taken_changes_nothing_unless_it_is_the_last(world: World) -> None:
    lease = world.running()
    for status in (RowStatus.OK, RowStatus.DUPLICATE):
        assert world.leases.answered(lease, status) is None
        assert lease.state is RUNNING


def test_what_the_server_lost_too_much_of_goes_back(world: World) -> None:
    lease = world.running()
    assert world.leases.answered(lease, RowStatus.GAP) is None
    assert (lease.state, lease.is_blamed, world.engine.sequences) == (RETURNING, False, [])


def test_a_later_attempt_takes_the_place_of_an_earlier_one(world: World) -> None:
    earlier = world.in_state(RETURNING)
    later = world.claimed()
    assert (earlier.state, list(world.leases)) == (GONE, [later])
    assert world.leases.released(earlier, "waiting") is Exit.GIVEN_BACK
    assert list(world.leases) == [later]


def test_what_is_prepared_too_late_is_dropped(world: World) -> None:
    for state in (RETURNING, GONE):
        lease = world.claimed()
        prepared = preparation().prepare(lease.claim)
        world.leases.returning(lease)
        if state is GONE:
            world.leases.released(lease, "waiting")
        world.leases.prepared(lease, prepared)
        assert (lease.state, len(world.leases.ready)) == (state, 0)


def test_what_has_nothing_left_to_generate_waits_for_its_last_row_only(world: World) -> None:
    lease = world.ready(events=emitted("abc"), max_tokens=3)
    assert (lease.state, len(world.leases.ready)) == (ENDING, 0)


@pytest.mark.parametrize("state", [READY, ENDING, RETURNING, GONE])
def test_only_what_is_prepared_or_runs_can_come_to_its_end(world: World, state: LeaseState) -> None:
    lease = world.in_state(state)
    with pytest.raises(RuntimeError, match=f"cannot go from {state.name} to ENDING"):
        world.leases.ending(lease)
    assert lease.state is state


def test_a_lease_cannot_be_released_twice(world: World) -> None:
    lease = world.in_state(RETURNING)
    world.leases.released(lease, "waiting")
    world.leases.returning(lease)
    assert lease.state is GONE


@pytest.mark.parametrize("state", [PREPARING, READY, RUNNING])
def test_only_what_returns_can_be_released(world: World, state: LeaseState) -> None:
    """Whatever the server says: to give it back without saying so first would be a mistake."""
    lease = world.in_state(state)
    with pytest.raises(RuntimeError, match="is not on its way back"):
        world.leases.released(lease, "waiting")


def test_as_many_run_as_have_a_place_and_any_that_is_more_urgent(world: World) -> None:
    for n in range(7):
        world.ready(f"r{n}", score=n, priority=0)
    world.leases.feed()
    assert (world.leases.num_running, len(world.leases.ready)) == (5, 2)
    assert [it.request_id for it in world.leases if it.state is RUNNING] == [
        f"r{n}" for n in range(5)
    ]
    assert world.running("urgent", score=-1.0, priority=-1).state is RUNNING
    assert (world.leases.num_running, len(world.leases.ready)) == (6, 2)
    world.ready("urgent too", score=-1.0, priority=0)
    world.leases.feed()
    assert world.leases.num_running == 6, "it is no more urgent than those that run"


def test_one_of_each_tenant_without_any_runs_beside_those_that_have_a_place(world: World) -> None:
    for n in range(6):
        world.ready(f"r{n}", score=n)
    few = [world.ready(f"few{n}", score=10 + n, tenant="few") for n in range(2)]
    other = world.ready("other", score=9, tenant="other", priority=-1)
    world.leases.feed()
    assert [it.state for it in (other, *few)] == [RUNNING, RUNNING, READY]
    assert (world.leases.num_running, len(world.leases.ready)) == (7, 2)
    assert world.leases.by_tenant(world.leases.preemptible) == [
        (0, 5, 45, ""),
        (0, 1, 9, "few"),
        (0, 0, 0, "other"),
        (-1, 1, 9, "other"),
    ]


def test_nobody_makes_room_who_has_one_or_is_more_urgent(world: World) -> None:
    for n in range(5):
        world.ready(f"r{n}", tenant=f"t{n}")
    world.leases.feed()
    assert world.running("few", tenant="few").state is READY
    urgent = World()
    for n in range(5):
        urgent.ready(f"r{n}", priority=-1)
    urgent.leases.feed()
    assert urgent.running("few", tenant="few").state is READY


def test_counts_what_it_holds(world: World) -> None:
    running = world.running("a", priority=3, cost=9)
    ready = world.ready("b", cost=2, prompt="four")
    aside, claimed = world.claimed("c", cost=100), world.claimed("d", cost=7)
    assert world.leases.set_aside(aside)
    world.leases.returning(ready)
    assert world.leases.preemptible == [(3, 1, 9, "")]
    assert (len(world.leases), world.leases.num_counted) == (4, 3)
    assert world.leases.kv_need == 9 + 4 + 7
    world.prepare(aside)
    assert world.leases.num_counted == 4
    assert world.leases.kv_need == 9 + 4 + 7 + 100
    for lease in (running, ready, aside, claimed):
        world.leases.answered(lease, RowStatus.CANCELLED)
    assert (len(world.leases), world.leases.kv_need, world.leases.preemptible) == (0, 0, [])


def test_a_suspect_is_noticed_from_its_claim_on(world: World) -> None:
    suspect = world.claimed(is_suspect=True)
    assert world.leases.has_suspect
    world.leases.answered(suspect, RowStatus.EXPIRED)
    assert not world.leases.has_suspect


def test_the_length_of_a_prompt_is_sent_until_the_server_has_it(world: World) -> None:
    lease = world.claimed()
    before = lease.as_held()
    assert before.prompt_tokens is None
    world.prepare(lease)
    lease.reported(before)
    assert [lease.as_held().prompt_tokens for _ in range(2)] == [4, 4]
    lease.reported(lease.as_held())
    assert lease.as_held().prompt_tokens is None


class Server:
    """The server's record of each attempt: its holder, and one outcome."""

    def __init__(self) -> None:
        self.outcome: dict[Lease, Outcome] = {}

    def of_lease(self, lease: Lease, end: FinishReason | None) -> RowStatus:
        """A renewal; `end` is what it finds out."""
        if lease in self.outcome:
            is_end = isinstance(self.outcome[lease], FinishReason)
            return RowStatus.FINISHED if is_end else RowStatus.FENCED
        if end is None:
            return RowStatus.OK
        self.outcome[lease] = end
        return RowStatus(end)

    def of_row(self, lease: Lease, reason: FinishReason) -> RowStatus:
        status = self.of_lease(lease, None)
        if status is RowStatus.OK:
            self.outcome[lease] = reason
        return status

    def of_return(self, lease: Lease) -> str:
        if lease in self.outcome:
            return str(self.of_lease(lease, None))
        self.outcome[lease] = Exit.of(lease)
        return "waiting"


def check(world: World, everything: list[Lease]) -> None:
    """Indices, engine and counts are what the states say."""
    leases = world.leases
    by_state = {state: [it for it in everything if it.state is state] for state in LeaseState}
    held = [it for it in everything if it.state is not GONE]
    running = by_state[RUNNING]
    assert {*leases} == {*held}
    assert len(leases) == len(held)
    assert leases.num_running == len(running)
    assert all(leases.by_sequence(it.prepared.sequence_id) is it for it in running)
    assert sorted(world.engine.sequences) == sorted(it.prepared.sequence_id for it in running)
    assert len(leases.ready) == len(by_state[READY])
    assert leases.due_back == [it for it in leases if it.state is RETURNING]
    assert leases.num_counted == len(held) - sum(it.is_aside for it in by_state[PREPARING])
    assert leases.kv_need == sum(it.kv_need for it in held)
    assert leases.is_busy == any(by_state[it] for it in (RUNNING, ENDING, RETURNING))
    first = leases.ready.first()
    ready = sorted(it.claim.order for it in by_state[READY])
    assert (first.claim.order if first else None) == (ready[0] if ready else None)


def test_a_random_walk_keeps_all_in_agreement_and_tells_each_outcome_once() -> None:
    """Answers come late and in any order, as calls are under way at the same time."""
    chance = random.Random(SEED)
    world, server = World(), Server()
    everything: list[Lease] = []
    told: Counter[Lease] = Counter()
    replies: list[tuple[str, Lease, str, str]] = []  # on their way: kind, lease, status, reason
    seen: Counter[tuple[LeaseState, LeaseState]] = Counter()
    prepared = preparation().prepare
    number = 0

    def note(lease: Lease, outcome: Outcome | None) -> None:
        if outcome is not None:
            told[lease] += 1
            assert told[lease] == 1, f"{outcome} is told of {lease.request_id} a second time"
            assert server.outcome[lease] == outcome

    for _ in range(STEPS):
        held = [it for it in everything if it.state is not GONE]
        before = {it: it.state for it in held}
        lease = chance.choice(held) if held else None
        event = chance.choice(
            ["claim", "prepare", "feed", "end", "fail", "return", "renew", "send", "release"]
            + ["reply"] * 4
        )
        if event == "claim" and len(held) < 12:
            number += 1
            fields = {"score": float(chance.randrange(9)), "priority": chance.randrange(3)}
            request_id = f"r{chance.randrange(16)}"
            if (earlier := world.leases.by_request(request_id)) is not None:
                server.outcome.setdefault(earlier, Exit.FENCED)  # else it cannot be claimed
                if isinstance(server.outcome[earlier], FinishReason):
                    continue
                note(earlier, world.leases.answered(earlier, RowStatus.FENCED))
            everything.append(world.claimed(request_id, fence=f"{number}-x", **fields))
            if chance.random() < 0.2:
                world.leases.set_aside(everything[-1])
        elif event == "feed":
            world.leases.feed()
        elif event == "reply" and replies:
            kind, lease, status, reason = replies.pop(chance.randrange(len(replies)))
            if kind == "release":
                note(lease, world.leases.released(lease, status))
            else:
                note(lease, world.leases.answered(lease, RowStatus(status), reason))
        elif lease is None:
            continue
        elif event == "prepare":
            world.leases.prepared(lease, prepared(lease.claim))
        elif event == "end" and lease.state is RUNNING:
            by_engine = chance.random() < 0.5
            if by_engine:
                world.engine.sequences.remove(lease.prepared.sequence_id)
            world.leases.ending(lease, by_engine=by_engine)
        elif event == "fail" and lease.state is PREPARING:
            world.leases.ending(lease)
        elif event == "return":
            world.leases.returning(lease, crashed=chance.random() < 0.3)
        elif event == "renew":
            end = chance.choice([None, None, FinishReason.CANCELLED, FinishReason.EXPIRED])
            replies.append(("renew", lease, server.of_lease(lease, end), ""))
        elif any(kind == event and it is lease for kind, it, _, _ in replies):
            continue  # one such call at a time
        elif event == "send" and lease.state is ENDING:
            reason = FinishReason.STOP
            replies.append(("send", lease, server.of_row(lease, reason), reason))
        elif event == "release" and lease.state is RETURNING:
            replies.append(("release", lease, server.of_return(lease), ""))
        everything = [it for it in everything if it.state is not GONE or it in before]
        seen.update((it_before, it.state) for it, it_before in before.items())
        check(world, everything)
    for old, new in [(PREPARING, READY), (RUNNING, ENDING), (ENDING, GONE), (RETURNING, GONE)]:
        assert seen[old, new] > STEPS / 1000, f"{old.name} to {new.name} was hardly walked"
    assert sum(told.values()) > STEPS / 100
