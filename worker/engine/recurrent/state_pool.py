"""The states of all recurrent layers, in entries of a fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from promptq.worker.engine.attention.kv_cache import zeros_in_pages
from promptq.worker.engine.core.sequence import ScheduledSequence, slot_of
from promptq.worker.engine.device.async_copies import to_device
from promptq.worker.engine.device.scratch import Scratch
from promptq.worker.engine.recurrent.mixer import Mixer
from promptq.worker.engine.recurrent.rows import RecurrentRows

ENTRIES_PER_SLOT = 2
"""Entries of each slot: a step reads one entry and writes the other. So a failed step can be
computed again, even after it wrote all states."""
_NONE = -1
"""The number of tokens of an entry without a state."""


def pool_bytes(mixers: Sequence[Mixer], num_slots: int) -> int:
    """Returns the bytes of a pool with this number of slots, including the kept states."""
    of_sequence = sum(spec.num_bytes for mixer in mixers for spec in mixer.state)
    return of_sequence * _num_entries(num_slots)


def num_kept_states(num_slots: int) -> int:
    """Returns how many states a pool stores for shared prefixes, besides the states of slots."""
    return -(-num_slots // 2)


def _num_entries(num_slots: int) -> int:
    return 1 + ENTRIES_PER_SLOT * num_slots + num_kept_states(num_slots)


class StatePool:
    """The states of the sequences in the slots of a batch.

    A sequence owns the entries of its slot as long as it has the slot. Entry 0 is the state before
    the first token, and stays zero. The last entries are kept states (see KeptStates).
    """

    def __init__(self, mixers: Sequence[Mixer], num_slots: int, device: torch.device) -> None:
        num_entries = _num_entries(num_slots)
        self._first_kept = num_entries - num_kept_states(num_slots)
        self._device = device
        self._scratch = Scratch(device)
        self.tensors = [
            [zeros_in_pages((num_entries, *spec.shape), spec.dtype, device) for spec in mixer.state]
            for mixer in mixers
        ]
        """For each mixer, a tensor [num_entries, *shape] for each StateSpec of its `state`."""
        self.num_slots = num_slots
        self._num_tokens = [[_NONE] * ENTRIES_PER_SLOT for _ in range(num_slots)]
        """For each slot and each of its entries, the number of tokens that the state covers."""

    def begin(self, items: Sequence[ScheduledSequence]) -> RecurrentRows:
        """Returns the rows of a step with these items, and the entries that the step reads and
        writes. The written states become valid with `finish`.

        Raises RuntimeError if a sequence continues from a state that its slot does not have.
        """
        read, written, starts, num_decodes = [], [], [0], 0
        for item in items:
            slot = slot_of(item.sequence)
            held, kept = self._num_tokens[slot], item.sequence.state_source
            if item.start == 0 or kept is not None:
                held[:] = [_NONE] * ENTRIES_PER_SLOT  # of the slot's previous sequence
                source = _NONE
            elif item.start in held:
                source = held.index(item.start)
            else:
                raise RuntimeError(
                    f"sequence {item.sequence.sequence_id} goes on after {item.start} tokens, and"
                    f" slot {slot} has the states after {held}"
                )
            target = (source + 1) % ENTRIES_PER_SLOT
            held[target] = _NONE
            if source != _NONE:
                read.append(self._entry(slot, source))
            else:
                read.append(0 if kept is None else self._first_kept + kept)
            written.append(self._entry(slot, target))
            starts.append(starts[-1] + item.num_rows)
            num_decodes += item.num_rows == 1
        counts, drafted = [item.num_rows for item in items], [len(item.draft) for item in items]
        table = np.array([read, written, starts[:-1], counts, drafted], dtype=np.int64)
        return RecurrentRows(num_decodes, starts, to_device(table, self._device), self._scratch)

    def finish(self, items: Sequence[ScheduledSequence]) -> None:
        """Record that a step with these items has written states. The states include no drafted
        tokens. Copies the states that are kept for shared prefixes."""
        for item in items:
            slot, end = slot_of(item.sequence), item.start + item.num_tokens
            held = self._num_tokens[slot]
            source = held.index(item.start) if item.start in held else _NONE
            target = (source + 1) % ENTRIES_PER_SLOT
            held[target] = end
            place = item.sequence.state_target
            if place is not None and end == item.sequence.keep_after:
                for tensor in chain(*self.tensors):
                    tensor[self._first_kept + place] = tensor[self._entry(slot, target)]

    def assume(self, items: Sequence[ScheduledSequence]) -> None:
        """Treat the slots' contents as the correct states for a dummy step with these items."""
        for item in items:
            if item.start not in (held := self._num_tokens[slot_of(item.sequence)]):
                held[:] = [item.start, _NONE]

    @staticmethod
    def _entry(slot: int, which: int) -> int:
        return 1 + slot * ENTRIES_PER_SLOT + which
