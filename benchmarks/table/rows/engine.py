"""The engine alone, without Redis and a worker."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.lib.memory import own_tree, peak_bytes, reset_peak
from benchmarks.table.jobs import Job, Outcome, Request, Trace, Workload, main, now
from promptq.shared.protocol.request import SamplingParams
from promptq.shared.settings.worker import read_worker_settings
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.api.port import Engine
from promptq.worker.serve.build import build

COUNTERS = ("prompt_tokens", "cached_tokens", "generation_tokens", "recomputed_tokens")


FORMATS: dict[str, dict[str, object]] = {
    "": {},
    "bf16": {"speculative_tokens": 0},
    "int8": {"speculative_tokens": 0, "quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"speculative_tokens": 0, "quantization": "int4"},
}


def load(
    model: str, max_num_seqs: int, max_model_len: int, kv_cache_bytes: int, format: str
) -> Engine:
    settings = read_worker_settings(
        model=model,
        dtype="bfloat16",
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        kv_cache_memory=str(kv_cache_bytes),
        **FORMATS[format],
    )
    return build(settings).engine


def run(job: Job, done: Callable[[str, Outcome], None]) -> None:
    sizes = (job.max_num_seqs, job.max_model_len, job.kv_cache_bytes)
    engine = load(job.model, *sizes, job.format)
    next_id = 1
    for workload in job.workloads:
        reset_peak(own_tree())
        outcome = drive(engine, workload, next_id)
        next_id += len(workload.requests)
        outcome.peak_bytes = peak_bytes(own_tree())
        done(workload.name, outcome)


def drive(engine: Engine, workload: Workload, first_id: int) -> Outcome:
    """Run one workload in the engine. Sequence ids begin with `first_id`."""
    before = engine.stats
    traces = {first_id + place: Trace(0.0) for place in range(len(workload.requests))}
    waiting = [(request, first_id + place) for place, request in enumerate(workload.requests)]
    started = now()
    while waiting or engine.has_work:
        elapsed = now() - started
        for item in list(waiting):
            request, sequence_id = item
            if request.at <= elapsed:
                waiting.remove(item)
                # A request that comes in the midst of a step has waited since then.
                traces[sequence_id].submitted = started + request.at
                engine.add(engine_request(request, sequence_id))
        if not engine.has_work:
            time.sleep(max(0.0, min(request.at for request, _ in waiting) - (now() - started)))
            continue
        outputs = engine.step().outputs
        at = now()
        for output in outputs:
            if output.error:
                raise RuntimeError(f"sequence {output.sequence_id}: {output.error}")
            traces[output.sequence_id].events.append(at)
            traces[output.sequence_id].num_tokens += len(output.token_ids)
    seconds = now() - started - min(request.at for request in workload.requests)
    after = engine.stats
    counters = {name: float(getattr(after, name) - getattr(before, name)) for name in COUNTERS}
    return Outcome(seconds, list(traces.values()), counters=counters)


def engine_request(request: Request, sequence_id: int) -> EngineRequest:
    return EngineRequest(
        sequence_id=sequence_id,
        prompt_token_ids=request.prompt,
        params=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=request.num_output),
        seed=0,
        max_tokens=request.num_output,
        order=(float(sequence_id), str(sequence_id)),
    )


if __name__ == "__main__":
    main(run)
