"""Statistics for dashboards and commands: of a worker, of a slot in its batch, and of a queue."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, field_validator

SAMPLE_MS = 5000
"""Milliseconds that one sample of a queue's statistics covers."""
RECORD_MS = 10_000
"""Milliseconds until a worker that reports nothing counts as gone."""


class _Observation(BaseModel):
    """Base of statistics. Unknown fields, which newer versions may send, are ignored."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class SlotState(StrEnum):
    """State of a sequence in a worker. A waiting sequence has no slot."""

    PREFILL = "prefill"
    DECODE = "decode"
    WAITING = "waiting"
    PREEMPTED = "preempted"


class SlotStats(_Observation):
    """Statistics of one sequence in a worker's engine, in the batch or waiting for a slot.

    Times are Unix milliseconds of the server; None if the event has not happened yet.
    """

    slot: int | None = None
    request_id: str
    tenant: str | None = None
    priority: int = 0
    attempt: int = 0
    state: SlotState = SlotState.WAITING
    prompt_tokens: int = 0
    emitted_tokens: int = 0
    """Number of tokens that all attempts have emitted."""
    max_tokens: int = 0
    """The most tokens that the request may emit."""
    computed_tokens: int = 0
    """Number of prompt and output tokens whose K and V are in the cache."""
    cached_tokens: int = 0
    """Number of prompt tokens that were in the cache when the sequence first joined the batch."""
    recomputed_tokens: int = 0
    preemptions: int = 0
    kv_blocks: int = 0
    kv_shared_blocks: int = 0
    """Number of this sequence's blocks that other sequences share."""
    claimed_at: int = 0
    prefill_at: int | None = None
    first_token_at: int | None = None
    """Time at which this attempt emitted its first token."""
    preempted_at: list[int] = []
    resumed_at: list[int] = []


SLOTS = TypeAdapter(list[SlotStats])
"""Reads and writes the statistics of all slots of a worker as JSON."""


class Sample(_Observation):
    """Statistics of a queue for the `SAMPLE_MS` ms after `at` (Unix milliseconds of the server).

    Counts are taken at the time `at`. Percentiles cover the requests whose first token came within
    the sample, with an error of about 2%. A percentile is None if there was no such request.
    """

    at: int
    waiting: int = 0
    priorities: dict[int, int] = {}
    """Number of waiting requests by priority."""
    delayed: int = 0
    active: int = 0
    """Number of requests that workers hold, running or prepared."""
    running: int = 0
    workers: int = 0
    tokens_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    """Prompt tokens per second, without tokens found in the cache."""
    worker_tokens_per_second: float = 0.0
    """Tokens per second that one worker generates while requests wait, measured in this sample and
    earlier ones; 0 if unknown."""
    finished: int = 0
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None
    """95th percentile of the milliseconds from enqueueing to the first token."""
    queue_p50_ms: float | None = None
    queue_p95_ms: float | None = None
    """95th percentile of the milliseconds from enqueueing to the first prefill."""

    @field_validator("priorities", mode="before")
    @classmethod
    def _read_priorities(cls, value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) else value

    @field_validator("ttft_p50_ms", "ttft_p95_ms", "queue_p50_ms", "queue_p95_ms", mode="before")
    @classmethod
    def _read_none(cls, value: Any) -> Any:
        return None if value == "" else value


class WorkerStats(_Observation):
    """A worker's heartbeat: the fields of its hash in Redis. Counts begin at the worker's start."""

    def reported(self, name: str) -> Any:
        """Returns the value of a statistic; None if the worker's engine does not report it."""
        return None if name in self.untold.split() else getattr(self, name)

    worker_id: str
    model: str = ""
    host: str = ""
    pid: int = 0
    state: str = "running"
    """`running`; `draining`: claims no more; `no_server`: its inference server does not answer."""
    overflow: bool = False
    """Whether the worker claims only requests that other workers of the queue would finish late."""
    holds_back: str = ""
    """Why the worker claims fewer requests than its slots could run; empty if it does not."""
    started_at_ms: int = 0
    heartbeat_at: int = 0
    """Time of the heartbeat in Unix milliseconds, set by the server."""
    device: str = ""
    dtype: str = ""
    max_num_seqs: int = 0
    max_model_len: int = 0
    """The most tokens of prompt and output together; 0 for older workers, which report none."""
    num_running: int = 0
    num_waiting: int = 0
    """Number of requests that wait in the engine for a slot."""
    num_prefetched: int = 0
    mean_prefetched: float = 0.0
    """Mean number of requests that are prepared and ready for the engine."""
    mean_prefetch_wait_ms: float = 0.0
    """Mean milliseconds that a prepared request waits until the engine takes it."""
    num_prefetch_empty: int = 0
    """Number of times that the engine had room and no request was prepared."""
    num_processed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    affinity_held: int = 0
    """Number of claimed requests whose beginning this worker had claimed before (`affinity_ms`)."""
    affinity_missed: int = 0
    """Number of claimed requests whose beginning only other workers had claimed before."""
    affinity_left: int = 0
    """Number of claimed requests that workers had first left to other workers."""
    affinity_cached_tokens: int = 0
    """Number of prompt tokens that the cache had for the requests of `affinity_held` that ended."""
    generation_tokens: int = 0
    recomputed_tokens: int = 0
    drafted_tokens: int = 0
    """Number of drafted (speculative) tokens that the model checked."""
    accepted_tokens: int = 0
    """Number of drafted tokens that were accepted."""
    num_preemptions: int = 0
    kv_tokens: int = 0
    kv_used_tokens: int = 0
    kv_bytes_per_token: int = 0
    state_bytes: int = 0
    """Bytes of all states of recurrent layers, including states stored for shared prefixes."""
    kv_blocks: int = 0
    kv_used_blocks: int = 0
    """Number of blocks that at least one sequence owns."""
    kv_shared_blocks: int = 0
    """Number of blocks that several sequences own."""
    kv_free_blocks: int = 0
    """Number of blocks that can be allocated: empty blocks, and cached blocks without an owner."""
    kv_cached_blocks: int = 0
    """Number of blocks that hold a cached prefix and have no owner."""
    step_ms: float = 0.0
    """Median duration of the latest steps in milliseconds."""
    current_step_ms: int = 0
    """Milliseconds since the current step began; about 0 if no step runs."""
    tokens_per_second: float = 0.0
    """Generated tokens divided by the seconds in which the engine had work."""
    recent_tokens_per_second: float = 0.0
    """Generated tokens per second since the last heartbeat, including idle time."""
    mean_queue_ms: float = 0.0
    mean_prompt_ms: float = 0.0
    mean_generation_ms: float = 0.0
    peak_memory_bytes: int = 0
    untold: str = ""
    """Names of the statistics that the worker's engine does not report, separated by spaces, such
    as `step_ms cached_tokens`. The values of these fields have no meaning."""
    refused: str = ""
    """Fields that the engine cannot serve now, separated by spaces, such as `logprobs embed`."""
    start_up_seconds: float = 0.0
    start_up_stages: str = ""
    """Seconds of each stage of the start, such as `weights=0.812 checking=1.204`."""
