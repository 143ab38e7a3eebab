"""Requests for an engine, and its steps to their end."""

from __future__ import annotations

from typing import Any

from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest, SequenceOutput
from promptq.worker.engine.core.llm_engine import LLMEngine

PARAMS = SamplingParams()


def make_request(sequence_id: int, prompt: list[int] | int = 5, **fields: Any) -> EngineRequest:
    """A request with a prompt of its own of that length, or with that very prompt."""
    if isinstance(prompt, int):
        prompt = [(sequence_id * 7 + index) % 256 for index in range(prompt)]
    return EngineRequest(
        sequence_id,
        prompt,
        fields.pop("params", PARAMS),
        seed=fields.pop("seed", sequence_id),
        max_tokens=fields.pop("max_tokens", 10),
        order=fields.pop("order", (float(sequence_id), str(sequence_id))),
        **fields,
    )


def run_to_end(engine: LLMEngine) -> dict[int, tuple[list[int], SequenceOutput]]:
    """Step until idle, auditing each time: tokens and last output of every sequence."""
    tokens: dict[int, list[int]] = {}
    last: dict[int, SequenceOutput] = {}
    while engine.has_work:
        assert engine.stats.num_steps < 5000, "it does not come to an end"
        for output in engine.step().outputs:
            assert output.sequence_id not in last, "an output after the last one"
            tokens.setdefault(output.sequence_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                last[output.sequence_id] = output
        engine.check_integrity()
    assert tokens.keys() == last.keys()
    return {sequence_id: (tokens[sequence_id], last[sequence_id]) for sequence_id in last}
