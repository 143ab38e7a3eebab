"""Keeps the states of recurrent layers at the ends of shared prefixes. Eviction is LRU."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from promptq.worker.engine.core.sequence import Sequence


class KeptStates:
    """Hands out places for states, and finds a state by the hash of the last block that the state
    covers.

    A place is an index into the runner's pool of states. A place is free, reserved or occupied. If
    a place is reserved, a sequence will write its state there. If a place is occupied, its state
    can be found. A sequence that begins with a state pins the state's place until the sequence's
    first step is done. If no place is free, `reserve` takes the place of the least recently used
    state that is not pinned.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._free = list(range(num_places))
        self._findable: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._pins: Counter[int] = Counter()

    def longest(self, block_hashes: list[bytes], most: int) -> int:
        """Returns the largest number of blocks, up to `most`, after which a state is kept; 0 if
        there is none."""
        counts = (
            count for count in range(most, 0, -1) if block_hashes[count - 1] in self._findable
        )
        return next(counts, 0)

    def pin(self, block_hash: bytes) -> int:
        """Returns the place of a findable state. The state stays there until `unpin`."""
        self._findable.move_to_end(block_hash)
        place = self._findable[block_hash]
        self._pins[place] += 1
        return place

    def unpin(self, place: int) -> None:
        self._pins[place] -= 1

    def reserve(self) -> int | None:
        """Reserves a place for a state, and returns it; None if every place is reserved or
        pinned."""
        if self._free:
            return self._free.pop()
        for block_hash, place in self._findable.items():
            if not self._pins[place]:
                del self._findable[block_hash]
                return place
        return None

    def publish(self, block_hash: bytes, place: int) -> None:
        """Make the state in a reserved place findable by the hash of the last block that the state
        covers."""
        if block_hash in self._findable:
            self.release(place)
        else:
            self._findable[block_hash] = place

    def release(self, place: int) -> None:
        """Make a reserved place free again."""
        self._free.append(place)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Compare all places with `sequences`: all sequences that have blocks. Raises RuntimeError,
        which names the inconsistency."""
        pins: Counter[int] = Counter()
        reserved = []
        for sequence in sequences:
            if sequence.state_source is not None:
                pins[sequence.state_source] += 1
            if sequence.state_target is not None:
                reserved.append(sequence.state_target)
        places = [*self._free, *self._findable.values(), *reserved]
        if sorted(places) != [*range(self._num_places)]:
            raise RuntimeError(
                f"places of kept states: free {self._free}, findable {[*self._findable.values()]}"
                f" and reserved {reserved} are not {self._num_places} places"
            )
        if pins != +self._pins:
            raise RuntimeError(f"places of kept states: pinned {+self._pins}, by sequences {pins}")
