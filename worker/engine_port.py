"""What a worker asks of any engine: the asyncio face, whatever is behind it."""

from __future__ import annotations

from typing import Protocol

from promptq.worker.engine.api.messages import (
    EngineAbilities,
    EngineLimits,
    EngineRequest,
    EngineSnapshot,
    EngineStats,
    StepOutput,
)


class EnginePort(Protocol):
    """Runs sequences and tells what came of them. All methods belong to one event loop."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def abilities(self) -> EngineAbilities: ...

    @property
    def stats(self) -> EngineStats:
        """Totals and the state of the batch, as they were last told."""
        ...

    def start(self) -> None:
        """Begin to run; the running loop is the one that fetches."""
        ...

    async def stop(self, patience: float) -> None:
        """End after the step that runs, unless that has taken more than `patience` seconds.

        What was not fetched is dropped.
        """
        ...

    def add(self, request: EngineRequest) -> None:
        """Take a sequence in. One that can never run ends with an error that says why."""
        ...

    def abort(self, sequence_id: int) -> None:
        """End a sequence; nothing is told of it any more once it was aborted in the engine.

        Of one that has ended, or never came, it is without effect.
        """
        ...

    async def snapshot(self) -> EngineSnapshot:
        """Where all sequences stand after the step that runs."""
        ...

    async def fetch(self) -> list[StepOutput]:
        """All steps since the last call, at least one; an engine that is not fetched from stops.

        Raises the engine's exception once it has failed and all before it was fetched.
        """
        ...

    @property
    def has_failed(self) -> bool:
        """Whether it does nothing any more."""
        ...

    @property
    def num_aborting(self) -> int:
        """Aborts that have not taken effect yet, so that their sequences still hold memory."""
        ...

    def seconds_without_progress(self) -> float:
        """How long it has been at one thing; about 0 while it waits for work, or to be fetched."""
        ...
