"""Outputs of streams on their way to the caller of `fetch`."""

from __future__ import annotations

import asyncio

from promptq.worker.engine.api.messages import SequenceOutput

_MAX_TOKENS = 4096


class Outbox:
    """Outputs that wait for `fetch`. Joins the outputs of each sequence, and makes streams wait
    while the outputs have too many tokens."""

    def __init__(self) -> None:
        self._outputs: list[SequenceOutput] = []
        self._growing: dict[int, SequenceOutput] = {}  # outputs that still grow, by sequence
        self._failure: Exception | None = None
        self._fetchable = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    def put(self, output: SequenceOutput) -> None:
        before = self._growing.get(output.sequence_id)
        if before is None or not output.token_ids:
            self._outputs.append(output)
        else:
            before.token_ids += output.token_ids
            before.finish_reason = output.finish_reason
            before.timing = output.timing or before.timing
            if before.logprobs is not None:
                before.logprobs += output.logprobs or ()
        if output.finish_reason is None and output.given_back is None:
            self._growing.setdefault(output.sequence_id, output)
        else:
            self._growing.pop(output.sequence_id, None)
        self._note_change()

    def drop(self, sequence_id: int) -> None:
        """Forget the waiting outputs of a sequence."""
        self._growing.pop(sequence_id, None)
        self._outputs = [output for output in self._outputs if output.sequence_id != sequence_id]
        self._note_change()

    def fail(self, error: Exception) -> None:
        """Make `fetch` raise the error once no output waits."""
        self._failure = error
        self._fetchable.set()

    async def fetch(self) -> list[SequenceOutput]:
        """Wait for an output, and return all waiting outputs. Raises the error of `fail`."""
        while not self._outputs:
            if self._failure is not None:
                raise self._failure
            self._fetchable.clear()
            await self._fetchable.wait()
        outputs, self._outputs = self._outputs, []
        self._growing.clear()
        self._note_change()
        return outputs

    async def wait_for_room(self) -> None:
        while not self._has_room.is_set():
            await self._has_room.wait()

    def _note_change(self) -> None:
        if self._outputs:
            self._fetchable.set()
        if sum(len(output.token_ids) for output in self._outputs) < _MAX_TOKENS:
            self._has_room.set()
        else:
            self._has_room.clear()
