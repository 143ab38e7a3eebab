"""What a worker asks of any engine: an asyncio interface, whatever is behind it."""

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
        """Whether it can run new sequences. While it cannot, nothing is claimed for it, and what is
        added is given back."""
        ...

    def start(self) -> None:
        """Start running. The running event loop is the one that fetches."""
        ...

    async def stop(self, patience: float) -> None:
        """Stop after the running step, unless that has taken more than `patience` seconds.

        Steps that were not fetched are dropped.
        """
        ...

    def add(self, request: EngineRequest) -> None:
        """Add a sequence. One that can never run ends with an error that says why."""
        ...

    def abort(self, sequence_id: int) -> None:
        """End a sequence. There is no output for it once the engine has aborted it.

        This has no effect on a sequence that has ended or was never added.
        """
        ...

    async def snapshot(self) -> EngineSnapshot:
        """The state of all sequences after the running step."""
        ...

    async def fetch(self) -> list[StepOutput]:
        """All steps since the last call, at least one. An engine that is not fetched from stops.

        Raises the exception of an engine that failed, once all steps before that were fetched.
        """
        ...

    @property
    def has_failed(self) -> bool:
        """Whether the engine has failed and does nothing any more."""
        ...

    @property
    def num_aborting(self) -> int:
        """Aborts that have not taken effect yet, so that their sequences still hold memory."""
        ...

    def seconds_without_progress(self) -> float:
        """How long it has been busy with one thing. About 0 while it waits for work or to be
        fetched."""
        ...
