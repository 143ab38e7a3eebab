"""What the engine asks of whatever turns a batch into tokens: a model, or a known function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from promptq.shared.protocol.events import TokenLogprob
from promptq.worker.engine.api.messages import EngineAbilities
from promptq.worker.engine.core.sequence import Batch


@dataclass(slots=True)
class SampledToken:
    """What was sampled in one row; with `error` set, that row alone failed."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Size of the KV cache that the runner holds."""

    num_blocks: int
    block_size: int
    bytes_per_token: int


class Runner(Protocol):
    """Computes batches. `launch` may return before the work is done; `collect` waits for it."""

    @property
    def kv_layout(self) -> KVLayout: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int:
        """Longest sequence the model can continue, prompt and output together."""
        ...

    @property
    def abilities(self) -> EngineAbilities: ...

    def launch(self, batch: Batch, after: Any = None) -> Any:
        """Start computing `batch`, writing K and V through the sequences' block tables.

        `after` is what `launch` gave for the step before, not collected yet, if this one begins
        with the tokens of that one (see Scheduler.follow).
        """
        ...

    def collect(self, launched: Any) -> list[list[SampledToken]]:
        """For each of `batch.sampling`, in that order, the token after its last known one, and
        after each that was drafted."""
        ...

    def peak_memory_bytes(self) -> int: ...
