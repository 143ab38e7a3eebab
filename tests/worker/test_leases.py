"""What a worker holds is counted, and its leases live as long as its engine makes progress."""

from __future__ import annotations

import asyncio

from promptq.worker.leases.lease import Lease
from promptq.worker.leases.leases import Leases, keep_alive
from tests.worker.test_held import prepare


def test_counts_what_is_held_and_what_is_in_the_engine() -> None:
    leases = Leases()
    urgent, lazy = prepare(priority=-1), prepare(priority=1)
    leases.add(urgent)
    assert leases.by_request("r") is urgent
    assert leases.by_sequence(urgent.sequence_id) is urgent
    leases.mark_in_engine(urgent)
    assert leases.preemptible == [(-1, urgent.kv_need)]
    leases.drop(urgent)
    leases.drop(urgent)
    assert urgent.ended
    assert (len(leases), leases.num_in_engine, leases.kv_need) == (0, 0, 0)
    leases.add(lazy)
    assert leases.kv_need == lazy.kv_need
    assert leases.preemptible == []
    leases.mark_out_of_engine(lazy)
    assert leases.num_in_engine == 0


def test_a_later_attempt_takes_the_place_of_an_earlier_one() -> None:
    leases = Leases()
    earlier, later = prepare(), prepare()
    leases.add(earlier)
    leases.add(later)
    leases.drop(earlier)
    assert list(leases) == [later]
    assert leases.by_sequence(earlier.sequence_id) is None


async def test_leases_are_renewed_while_the_engine_makes_progress_only() -> None:
    leases = Leases()
    leases.add(prepare())
    renewed: list[list[Lease]] = []
    asked = 0

    async def renew(held: list[Lease]) -> None:
        renewed.append(held)

    def is_stuck() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    keeping = asyncio.create_task(keep_alive(leases, 8, renew, is_stuck))
    while asked < 6:
        await asyncio.sleep(0.001)
    assert renewed == [list(leases)] * 3
    keeping.cancel()
