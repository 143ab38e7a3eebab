"""The engine's interface to a runner, which computes batches with or without a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from promptq.shared.protocol.events import TokenLogprob
from promptq.worker.engine.api.messages import EngineAbilities, PromptLogprobs
from promptq.worker.engine.core.sequence import Batch


@dataclass(slots=True)
class SampledToken:
    """The token sampled in one row. If `error` is set, only this row failed."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The size of the memory that the runner has for sequences."""

    num_blocks: int
    block_size: int
    bytes_per_token: int
    num_states: int | None = None
    """The number of sequences for which recurrent layers have states. None: no recurrent layers."""
    num_kept_states: int = 0
    """The number of further states, which are kept after shared prefixes."""
    state_bytes: int = 0
    """Bytes of all states together."""
    states_skip_drafts: bool = False
    """Whether the states after a step exclude drafted rows. Only then may steps have drafts."""


class Runner(Protocol):
    """Computes batches. `launch` may return before the work is done; `collect` waits for the
    results."""

    @property
    def kv_layout(self) -> KVLayout: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int:
        """The most tokens of a sequence that the model can compute, prompt and output together."""

    @property
    def embedding_size(self) -> int:
        """See `EngineLimits.embedding_size`."""

    @property
    def abilities(self) -> EngineAbilities: ...

    def launch(self, batch: Batch, after: Any = None) -> Any:
        """Start to compute `batch`. Writes K and V through the block tables of the sequences.

        Returns the launched step, for `collect`. `after` is the previous step if it is launched but
        not collected. Then the tokens of `after` are inputs of `batch` (see `Scheduler.follow`).
        """

    def collect(self, launched: Any) -> list[list[SampledToken]]:
        """Returns a list of sampled tokens for each item of the launched batch's `sampling`: the
        token after the last known token, and one after each drafted token. Sets `states` of items
        whose sequences want embeddings."""

    def prompt_logprobs(self, launched: Any) -> list[PromptLogprobs]:
        """Returns log-probabilities for each share of `batch.reporting`: for each position in the
        share's `reported_rows`, the log-probability of the next prompt token."""

    def peak_memory_bytes(self) -> int: ...
