"""vLLM without its server: `LLM.generate` gets all prompts at once and reports only the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.lib.memory import own_tree, peak_bytes, reset_peak
from benchmarks.table.jobs import Job, Outcome, Trace, Workload, main, now


def run(job: Job, done: Callable[[str, Outcome], None]) -> None:
    from vllm import LLM

    llm = LLM(
        model=job.model,
        dtype=job.torch_dtype,
        max_num_seqs=job.max_num_seqs,
        max_model_len=job.max_model_len,
        kv_cache_memory_bytes=job.kv_cache_bytes,
        disable_log_stats=True,
    )
    for workload in job.workloads:
        reset_peak(own_tree())
        outcome = drive(llm, workload)
        outcome.peak_bytes = peak_bytes(own_tree())
        done(workload.name, outcome)


def drive(llm: Any, workload: Workload) -> Outcome:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": request.prompt} for request in workload.requests]
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=request.num_output, ignore_eos=True, detokenize=False
        )
        for request in workload.requests
    ]
    started = now()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = now() - started
    num_tokens = [len(output.outputs[0].token_ids) for output in outputs]
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    counters = {"prompt_tokens": sum(len(p["prompt_token_ids"]) for p in prompts) - cached}
    return Outcome(
        seconds, [Trace(started, num_tokens=num) for num in num_tokens], counters=counters
    )


if __name__ == "__main__":
    main(run)
