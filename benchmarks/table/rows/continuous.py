"""transformers' own continuous batching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.lib.memory import own_tree, peak_bytes, reset_peak
from benchmarks.table.jobs import Job, Outcome, Trace, Workload, main, now

_PAGE_TOKENS, _BATCH_TOKENS = 256, 512
"""The fastest values, by a few percent, of pages of 16 to 256 tokens and of budgets of 256 to 2,048
tokens."""


def run(job: Job, done: Callable[[str, Outcome], None]) -> None:
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=job.torch_dtype, attn_implementation="sdpa"
    ).eval()
    config = model.config
    num_numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    token_bytes = num_numbers * model.dtype.itemsize
    manager = model.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=job.max_model_len),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS,
            num_blocks=job.kv_cache_bytes // token_bytes // _PAGE_TOKENS,
            max_batch_tokens=_BATCH_TOKENS,
            max_requests_per_batch=job.max_num_seqs,
        ),
    )
    manager.start()
    try:
        for workload in job.workloads:
            reset_peak(own_tree())
            outcome = drive(manager, workload)
            outcome.peak_bytes = peak_bytes(own_tree())
            done(workload.name, outcome)
    finally:
        manager.stop(block=True)


def drive(manager: Any, workload: Workload) -> Outcome:
    started = now()
    for place, request in enumerate(workload.requests):
        manager.add_request(
            request.prompt,
            request_id=f"{workload.name}-{place}",
            max_new_tokens=request.num_output,
            record_timestamps=True,
        )
    traces = []
    while len(traces) < len(workload.requests):
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("the generation thread ended")
        elif result.is_finished():
            if result.error is not None:
                raise RuntimeError(result.error)
            traces.append(Trace(started, result.timestamps or [], len(result.generated_tokens)))
    return Outcome(now() - started, traces)


if __name__ == "__main__":
    main(run)
