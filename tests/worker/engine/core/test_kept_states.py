"""Places of kept states: no place is lost, and none is written while a sequence still reads it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from promptq.shared.protocol.request import NEUTRAL
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.core.block_manager import BlockManager
from promptq.worker.engine.core.kept_states import KeptStates
from promptq.worker.engine.core.scheduler import Scheduler
from promptq.worker.engine.core.sequence import Sequence
from tests.worker.engine.core.stepping import BLOCK, add, make_sequence, step


def test_the_least_recently_used_state_goes_first() -> None:
    kept = KeptStates(2)
    for name in (b"a", b"b"):
        place = kept.reserve()
        assert place is not None
        kept.publish(name, place)
    kept.unpin(kept.pin(b"a"))
    place = kept.reserve()
    assert place is not None
    assert (kept.longest([b"b"], 1), kept.longest([b"a"], 1)) == (0, 1)
    kept.publish(b"a", place)  # another sequence was faster
    kept.check_integrity([])


def test_a_pinned_state_stays() -> None:
    kept = KeptStates(1)
    place = kept.reserve()
    assert place is not None
    kept.publish(b"a", place)
    kept.pin(b"a")
    assert kept.reserve() is None
    kept.unpin(place)
    assert kept.reserve() == place
    assert kept.longest([b"a"], 1) == 0


def test_a_lost_place_is_noticed() -> None:
    kept = KeptStates(2)
    kept.reserve()
    with pytest.raises(RuntimeError, match="are not 2 places"):
        kept.check_integrity([])
    kept = KeptStates(1)
    kept.publish(b"a", kept.reserve() or 0)
    kept.pin(b"a")
    with pytest.raises(RuntimeError, match="pinned"):
        kept.check_integrity([])


class CountedHashes(list[bytes]):
    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[bytes]:
        for block_hash in super().__iter__():
            self.num_read += 1
            yield block_hash


def test_the_end_of_a_common_prefix_is_found_without_reading_all_hashes() -> None:
    shared = list(range(4000))
    first, second = (make_sequence(0, tokens=[*shared, 7 + number]) for number in range(2))
    manager = BlockManager(2500, BLOCK, kept_states=KeptStates(2))
    scheduler = Scheduler(4, 64, 64, manager)
    add(scheduler, first, second)
    step(scheduler)
    hashes = first.block_hashes = CountedHashes(first.block_hashes)
    step(scheduler)
    assert first.keep_after == 4000
    assert len(hashes) == 1000
    assert 0 < hashes.num_read < 60


def test_places_survive_any_order_of_events(seed: int) -> None:
    """Sequences come, compute some tokens, keep states, and leave at any time."""
    rng = random.Random(seed)
    manager = BlockManager(60, 2, kept_states=KeptStates(3))
    running: list[Sequence] = []
    num_shared = 0
    for number in range(400):
        if len(running) < 4 and rng.random() < 0.5:
            prompt = [rng.randrange(2)] * 6 + [rng.randrange(2) for _ in range(rng.randint(1, 6))]
            sequence = Sequence.of(EngineRequest(number, prompt, NEUTRAL, seed=0, max_tokens=1))
            prefix = manager.find_prefix(sequence)
            manager.allocate(sequence, prefix)
            sequence.num_computed_tokens = 2 * len(prefix)
            num_shared += len(prefix)
            running.append(sequence)
        for sequence in [*running]:
            start = sequence.num_computed_tokens
            end = rng.randint(start + 1, sequence.num_tokens)
            if start < sequence.keep_after:
                end = min(end, sequence.keep_after)
            manager.reserve_state(sequence, end)
            manager.check_integrity(running)
            if rng.random() < 0.7:
                manager.mark_computed(sequence, start, end)
                sequence.num_computed_tokens = end
            if sequence.num_computed_tokens == sequence.num_tokens or rng.random() < 0.2:
                manager.free(sequence)
                running.remove(sequence)
            manager.check_integrity(running)
    assert num_shared > 0
