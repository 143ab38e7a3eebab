"""The interface that a worker needs of any engine, and how a start reports its progress."""

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
    """A callback for the stages of a start, such as loading weights."""

    def __call__(self, stage: str, share: float | None = None) -> object:
        """Report that `stage` is running, and that the stage before is over.

        `share` is the part of the stage that is done, from 0 to 1; None if unknown.
        """
        ...


def unheard(stage: str, share: float | None = None) -> None:
    """A Progress that does nothing."""


class Engine(Protocol):
    """A continuous batch. Not thread-safe: one thread drives it."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def abilities(self) -> EngineAbilities: ...

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    def add(self, request: EngineRequest) -> None:
        """Add a sequence, which then waits for a slot and blocks.

        Raises ValueError if it can never fit.
        """
        ...

    def abort(self, sequence_id: int) -> bool:
        """End a sequence without a further output; slot and blocks are free on return.

        Returns False if the engine does not hold the sequence.
        """
        ...

    def step(self) -> StepOutput:
        """Schedule, compute and commit one step."""
        ...

    def recover(self, error: Exception) -> StepOutput:
        """Compute the work of a step that raised `error` again, in parts if necessary.

        A sequence that fails alone ends with an error. A sequence that lacks memory even alone
        waits without blocks for a few more tries, and is then given back. Raises if the engine
        itself is broken, or if `error` came before the step was planned.
        """
        ...

    def snapshot(self) -> EngineSnapshot:
        """Returns the state of all sequences, for dashboards."""
        ...

    def check_integrity(self) -> None:
        """Audit blocks and slots. Raises RuntimeError that names the inconsistency."""
        ...


@runtime_checkable
class EnginePort(Protocol):
    """Runs sequences and returns their outputs. All methods belong to one event loop."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def abilities(self) -> EngineAbilities: ...

    @property
    def stats(self) -> EngineStats:
        """The totals and the state of the batch, as last reported."""
        ...

    @property
    def is_accepting(self) -> bool:
        """Whether the engine can run new sequences. While it cannot, a worker claims nothing, and
        the engine gives back every sequence that is added."""
        ...

    def start(self) -> None:
        """Start running. Call this in the event loop that calls `fetch`."""
        ...

    async def stop(self, patience: float) -> None:
        """Stop after the running step, unless that has taken more than `patience` seconds.

        Steps that were not fetched are dropped.
        """
        ...

    def add(self, request: EngineRequest) -> None:
        """Add a sequence. A sequence that can never run ends with an error that says why."""
        ...

    def abort(self, sequence_id: int) -> None:
        """End a sequence. Once the engine has aborted the sequence, there is no output for it.

        Has no effect on a sequence that has ended or was never added.
        """
        ...

    async def snapshot(self) -> EngineSnapshot:
        """Returns the state of all sequences after the running step."""
        ...

    async def fetch(self) -> list[StepOutput]:
        """Returns all steps since the last call, at least one. An engine pauses if nobody fetches.

        Raises the exception of an engine that failed, once all steps before that were fetched.
        """
        ...

    @property
    def has_failed(self) -> bool:
        """Whether the engine has failed and no longer does anything."""
        ...

    @property
    def num_aborting(self) -> int:
        """Number of aborted sequences that still hold memory, since no abort is immediate."""
        ...

    def seconds_without_progress(self) -> float:
        """Returns how long the current piece of work has taken so far. About 0 while the engine
        waits for work or for a call of `fetch`."""
        ...
