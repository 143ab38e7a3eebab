"""Decodes in parts, in Triton's interpreter, or with TRITON_INTERPRET=0 on a GPU."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from random import Random

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton is not installed here", allow_module_level=True)
DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")

from benchmarks.gpu.cases import Case, Shape, off_by
from promptq.worker.engine.attention.decode_work import DecodeWork
from promptq.worker.engine.attention.triton_kernels.decode import span_list
from promptq.worker.engine.attention.triton_kernels.paged import TritonPaged
from promptq.worker.engine.attention.types import DECODE_WORK, FULL, Pattern, Scoring

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_random_batches(dtype: torch.dtype, seed: int) -> None:
    random = Random(f"{seed} {dtype}")
    longest = 900 if dtype == torch.float32 else random.choice([900, 1800, 3600, 5000])
    contexts = [random.randint(longest // 2, longest), random.randint(257, 450)]
    contexts += sorted((random.randint(1, 256) for _ in range(2)), reverse=True)
    num_kv_heads = 2 if longest < 1000 else 1
    shape = Shape(
        random.choice([1, 2, 3, 4, 7, 8, 16]) * num_kv_heads,
        num_kv_heads,
        random.choice([64, 80, 128, 192, 256]),
        random.choice([64, 128, 256]),
        block_size=random.choice([16, 32, 48, 64]),
    )
    sliding = Pattern("sliding", random.randint(1, longest))
    pattern = random.choice([FULL, FULL, sliding, Pattern("chunked", random.randint(1, longest))])
    case = Case([(each, 1) for each in contexts], shape, dtype=dtype, device=DEVICE, seed=seed)
    scoring = Scoring(
        shape.key_size**-0.5,
        pattern,
        random.choice([None, 2.0]),
        random.choice([None, case.sinks]),
    )
    expected = case.expected(scoring)
    for _ in range(2):  # as two layers, the second of which finds what the first one left
        output = case.attend(TritonPaged(), scoring)
        assert off_by(output, expected) < TOLERANCE[dtype], (contexts, shape, scoring)
    assert case.untouched()


def test_bits_do_not_depend_on_other_rows(seed: int) -> None:
    """Nor on what the memory of a graph has room for."""
    contexts = [2000, 700, *range(62, 0, -1)]
    shape = Shape(2, 1, 64, 64)
    case = Case(
        [(each, 1) for each in contexts], shape, dtype=torch.bfloat16, device=DEVICE, seed=seed
    )
    scoring = Scoring(0.3)
    together = case.attend(TritonPaged(), scoring)
    layout = case.layout
    for row in (0, 1, 2, 63):
        roomy = DecodeWork([5000] * 3, DEVICE)
        roomy.spans(span_list(FULL, case.query, case.cache))
        roomy.fill([contexts[row]])
        for plans in ({}, {DECODE_WORK: roomy}):
            alone = replace(
                layout,
                num_decodes=1,
                query_starts=[0, 1],
                context_lens=[contexts[row]],
                block_tables=layout.block_tables[row : row + 1],
                plans=plans,
            )
            query = case.query[row : row + 1]
            output = TritonPaged().attend_written(query, case.cache, alone, scoring)
            assert torch.equal(output[0], together[row]), contexts[row]
