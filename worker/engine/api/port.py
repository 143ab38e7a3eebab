"""The interfaces of engines, and the callback that reports the progress of a start."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from promptq.worker.engine.api.messages import (
    EngineAbilities,
    EngineLimits,
    EngineRequest,
    EngineSnapshot,
    EngineStats,
    StepOutput,
)


class Progress(Protocol):
    """A callback for the stages of a worker's start, such as loading weights."""

    def __call__(self, stage: str, share: float | None = None) -> object:
        """Report that `stage` has begun or goes on, and that the stage before it is over. `share`
        is the completed part of the stage, from 0 to 1; None if it is unknown."""


def ignore_progress(stage: str, share: float | None = None) -> None:
    """A Progress that does nothing."""


class Capacity(Protocol):
    """An engine's limits and abilities. The abilities may change."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def abilities(self) -> EngineAbilities: ...


class Engine(Capacity, Protocol):
    """An engine that computes a continuous batch step by step. Only one thread may call the
    engine."""

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""

    @property
    def stats(self) -> EngineStats: ...

    def add(self, request: EngineRequest) -> None:
        """Add a sequence, which waits for a slot and blocks. Raises ValueError if the sequence can
        never fit, or is already in the engine."""

    def abort(self, sequence_id: int) -> bool:
        """End a sequence without a further output. The sequence's slot and blocks are free on
        return. Returns False if the engine does not have the sequence."""

    def step(self) -> StepOutput:
        """Schedule, compute and commit one step. Returns the outputs of its sequences."""

    def recover(self, error: Exception) -> StepOutput:
        """Repeat a step that raised `error`, in parts if necessary.

        If a sequence also fails alone, the engine ends the sequence with an error. If memory was
        short, the engine instead frees the sequence's blocks, tries a few more times, and then
        gives the sequence back. Raises an exception if the engine is broken, or if no step has
        failed.
        """

    def snapshot(self) -> EngineSnapshot:
        """Returns the state of all sequences, for dashboards."""

    def check_integrity(self) -> None:
        """Audit blocks and slots. Raises RuntimeError, which names the inconsistency."""


@runtime_checkable
class EnginePort(Capacity, Protocol):
    """The interface that a worker uses for every engine. Call all methods in one event loop."""

    @property
    def stats(self) -> EngineStats:
        """The totals and the state of the batch, as the engine last reported them."""

    @property
    def is_accepting(self) -> bool:
        """Whether the engine can run new sequences. If false, the worker claims nothing, and the
        engine gives back each new sequence to the queue."""

    def start(self) -> None:
        """Start the engine. Call this in the event loop that calls `fetch`."""

    async def stop(self, patience: float) -> None:
        """Stop the engine. Waits for the end of the running step, but no longer than `patience`
        seconds from the beginning of the step. Steps that were not fetched are dropped."""

    def add(self, request: EngineRequest) -> None:
        """Add a sequence. If the sequence can never run, its output is an error that names the
        reason."""

    def abort(self, sequence_id: int) -> None:
        """End a sequence without a further output, as soon as the engine has handled the abort. Has
        no effect on a sequence that has ended or was never added."""

    async def snapshot(self) -> EngineSnapshot:
        """Returns the state of all sequences after the running step."""

    async def fetch(self) -> list[StepOutput]:
        """Wait until a step ends, and return all steps that ended since the last call. If `fetch`
        is not called, the engine pauses.

        Raises the exception of an engine that failed, once all earlier steps have been fetched.
        """

    @property
    def has_failed(self) -> bool:
        """Whether the engine has failed and no longer does anything."""

    @property
    def num_aborting(self) -> int:
        """Number of aborted sequences that hold memory until a step ends."""

    def seconds_without_progress(self) -> float:
        """Returns the seconds since the engine began its current piece of work. Returns about 0
        while the engine waits for work or for a call of `fetch`."""
