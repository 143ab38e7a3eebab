"""Statistics for people: of a worker, of a slot of its batch, and a sample of a queue."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, field_validator

SAMPLE_MS = 5000
"""The time that one sample of a queue's statistics covers."""


class _Observation(BaseModel):
    """Base of statistics. Unknown fields come from a newer version and are ignored."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class SlotState(StrEnum):
    """The state of a sequence. Sequences that wait have no slot."""

    PREFILL = "prefill"
    DECODE = "decode"
    WAITING = "waiting"
    PREEMPTED = "preempted"


class SlotStats(_Observation):
    """A sequence of a worker's batch, or one that waits inside the engine to join it.

    Times are Unix milliseconds of the server, None for events that have not happened.
    """

    slot: int | None = None
    request_id: str
    tenant: str | None = None
    priority: int = 0
    attempt: int = 0
    state: SlotState = SlotState.WAITING
    prompt_tokens: int = 0
    emitted_tokens: int = 0
    """Tokens that all attempts have emitted."""
    max_tokens: int = 0
    """The most tokens that may be emitted."""
    computed_tokens: int = 0
    """Tokens of prompt and output whose K and V are in the cache."""
    cached_tokens: int = 0
    """Prompt tokens that were in the cache when the sequence first joined the batch."""
    recomputed_tokens: int = 0
    preemptions: int = 0
    kv_blocks: int = 0
    kv_shared_blocks: int = 0
    """Number of the `kv_blocks` that other sequences use too."""
    claimed_at: int = 0
    prefill_at: int | None = None
    first_token_at: int | None = None
    """When this attempt emitted its first token."""
    preempted_at: list[int] = []
    resumed_at: list[int] = []


SLOTS = TypeAdapter(list[SlotStats])
"""A worker's batch as JSON."""


class Sample(_Observation):
    """Statistics of a queue over `SAMPLE_MS` from `at` on (Unix milliseconds of the server).

    Counts are those at time `at`. Percentiles cover the requests that got their first token within
    the sample, with an error of about 2%. They are None if there were no such requests.
    """

    at: int
    waiting: int = 0
    priorities: dict[int, int] = {}
    """Number of waiting requests by priority."""
    delayed: int = 0
    active: int = 0
    """Requests that workers hold, running or prepared."""
    running: int = 0
    workers: int = 0
    tokens_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    """Prompt tokens a second, without tokens that were found in the cache."""
    worker_tokens_per_second: float = 0.0
    """Tokens a second of one worker while requests wait, from the samples; 0: not measured yet."""
    finished: int = 0
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None
    """Milliseconds from enqueueing to the first token."""
    queue_p50_ms: float | None = None
    queue_p95_ms: float | None = None
    """Milliseconds from enqueueing to the first prefill."""

    @field_validator("priorities", mode="before")
    @classmethod
    def _read_priorities(cls, value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) else value

    @field_validator("ttft_p50_ms", "ttft_p95_ms", "queue_p50_ms", "queue_p95_ms", mode="before")
    @classmethod
    def _read_none(cls, value: Any) -> Any:
        return None if value == "" else value


class WorkerStats(_Observation):
    """A worker's heartbeat: its hash's fields. Counts are totals since the worker started."""

    def reported(self, name: str) -> Any:
        """Returns the value of a statistic; None if the worker's engine does not report it."""
        return None if name in self.untold.split() else getattr(self, name)

    worker_id: str
    model: str = ""
    host: str = ""
    pid: int = 0
    state: str = "running"
    """`running`; `no_server` while its inference server does not answer; `draining` once it claims
    no more."""
    started_at_ms: int = 0
    heartbeat_at: int = 0
    """Server time in ms, set by the server."""
    device: str = ""
    dtype: str = ""
    max_num_seqs: int = 0
    max_model_len: int = 0
    """The longest prompt and output together; 0 from older workers, which do not report it."""
    num_running: int = 0
    num_waiting: int = 0
    """Requests in the engine that have no slot yet."""
    num_prefetched: int = 0
    mean_prefetched: float = 0.0
    """Average number of prepared requests."""
    mean_prefetch_wait_ms: float = 0.0
    """Average wait of a prepared request until it was handed out."""
    num_prefetch_empty: int = 0
    """Number of times that the engine wanted a request and none was prepared."""
    num_processed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    recomputed_tokens: int = 0
    drafted_tokens: int = 0
    """Drafted tokens that were computed along with decodes."""
    accepted_tokens: int = 0
    """Drafted tokens that were right."""
    num_preemptions: int = 0
    kv_tokens: int = 0
    kv_used_tokens: int = 0
    kv_bytes_per_token: int = 0
    state_bytes: int = 0
    """Bytes of all states of recurrent layers, also of those kept after shared prefixes."""
    kv_blocks: int = 0
    kv_used_blocks: int = 0
    """Blocks that some sequence owns."""
    kv_shared_blocks: int = 0
    """Blocks that several sequences own."""
    kv_free_blocks: int = 0
    """Blocks that can be allocated: empty ones, and those that hold a prefix but have no owner."""
    kv_cached_blocks: int = 0
    """Blocks that hold a prefix but have no owner."""
    step_ms: float = 0.0
    """Median of the last steps."""
    current_step_ms: int = 0
    """Time of the current step so far; about 0 if there is none."""
    tokens_per_second: float = 0.0
    """Generated tokens a second, counting only the time in which the engine had work."""
    recent_tokens_per_second: float = 0.0
    """Generated tokens a second since the last heartbeat, busy or not."""
    mean_queue_ms: float = 0.0
    mean_prompt_ms: float = 0.0
    mean_generation_ms: float = 0.0
    peak_memory_bytes: int = 0
    untold: str = ""
    """Names of the statistics that the worker's engine does not report, separated by spaces:
    `step_ms cached_tokens`. Their values here mean nothing."""
    refused: str = ""
    """Names of the fields of a request that the worker's engine cannot serve now, separated by
    spaces: `logprobs response_format`."""
    start_up_seconds: float = 0.0
    start_up_stages: str = ""
    """Seconds of each stage: `weights=0.812 checking=1.204 ...`."""
