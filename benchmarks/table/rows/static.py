"""transformers `generate` in static batches, sorted by output length, so that few rows are idle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.lib.memory import own_tree, peak_bytes, reset_peak
from benchmarks.table.jobs import Job, Outcome, Trace, Workload, main, now

_BATCH = 32


def run(job: Job, done: Callable[[str, Outcome], None]) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=job.torch_dtype).eval()
    for workload in job.workloads:
        reset_peak(own_tree())
        outcome = drive(model, workload)
        outcome.peak_bytes = peak_bytes(own_tree())
        done(workload.name, outcome)


def drive(model: Any, workload: Workload) -> Outcome:
    """Run each batch until its longest request has all tokens. Only requested tokens count."""
    import torch

    requests = sorted(workload.requests, key=lambda request: request.num_output)
    started = now()
    for first in range(0, len(requests), _BATCH):
        batch = requests[first : first + _BATCH]
        width = max(len(request.prompt) for request in batch)
        padding = [width - len(request.prompt) for request in batch]
        inputs = [[0] * pad + request.prompt for pad, request in zip(padding, batch, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        longest = max(request.num_output for request in batch)
        with torch.inference_mode():
            output = model.generate(
                torch.tensor(inputs),
                attention_mask=torch.tensor(mask),
                do_sample=False,
                min_new_tokens=longest,
                max_new_tokens=longest,
                pad_token_id=0,
            )
        if output.shape[1] != width + longest:
            raise RuntimeError(f"{output.shape[1] - width} tokens came instead of {longest}")
    traces = [Trace(started, num_tokens=request.num_output) for request in requests]
    return Outcome(now() - started, traces)


if __name__ == "__main__":
    main(run)
