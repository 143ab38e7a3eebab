"""Each fused kernel in Triton's interpreter, or with TRITON_INTERPRET=0 on a GPU."""

from __future__ import annotations

import os
import random
from importlib.util import find_spec

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

if find_spec("triton") is None:
    pytest.skip("triton is not installed here", allow_module_level=True)
DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")

from benchmarks.gpu.cases import off_by, poisoned_memory
from promptq.worker.engine.attention.types import LayerCache, StepLayout
from promptq.worker.engine.decoders.kernels.activation import TILE, silu_and_multiply
from promptq.worker.engine.decoders.kernels.heads import place_heads
from promptq.worker.engine.decoders.kernels.norm import add_rms_norm

EPSILON = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Numbers:
    """Random tensors of one dtype."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self._dtype, self._generator = dtype, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(DEVICE, self._dtype)


def norm_of(weight: torch.Tensor) -> Qwen3RMSNorm:
    module = Qwen3RMSNorm(len(weight), EPSILON)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


def check_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Rounded in the same places, so that a sum in another order changes few numbers' last bit.

    The interpreter cuts bf16 numbers off where a card rounds them.
    """
    assert found.dtype == expected.dtype
    if found.dtype == torch.bfloat16 and DEVICE.type == "cpu":
        assert off_by(found, expected.double()) < 0.02
        return
    eps = torch.finfo(found.dtype).eps
    if found.dtype != torch.float32:
        assert (found == expected).float().mean() > 0.97
    torch.testing.assert_close(found, expected, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_sum(dtype: torch.dtype, seed: int) -> None:
    """The sum is in `hidden` afterwards, and each row has the bits that it has alone."""
    draw = random.Random(seed)
    for has_update in (True, False):
        numbers, size = Numbers(dtype, seed), draw.choice([16, 100, 1000])
        before, weight = numbers(5, size), numbers(size)
        update = numbers(5, size) if has_update else None
        hidden = before.clone()
        with poisoned_memory():
            normed = add_rms_norm(hidden, update, weight, EPSILON)
        expected = before if update is None else before + update
        check_close(hidden, expected)
        check_close(normed, norm_of(weight)(hidden))
        for row in range(5):
            alone = None if update is None else update[row : row + 1]
            found = add_rms_norm(before[row : row + 1].clone(), alone, weight, EPSILON)
            assert torch.equal(found[0], normed[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu(dtype: torch.dtype, seed: int) -> None:
    for size in (random.Random(seed).randrange(1, 200), TILE + 3):
        gate_up = 3 * Numbers(dtype, seed)(3, 2 * size)
        gate_up[0, 0], gate_up[1, 0] = -80.0, 80.0
        with poisoned_memory():
            found = silu_and_multiply(gate_up)
        gate, up = gate_up.chunk(2, dim=1)
        check_close(found, torch.nn.functional.silu(gate) * up)
        assert torch.equal(silu_and_multiply(gate_up[1:2])[0], found[1])


class Heads:
    """A layer's projections, and a cache in which all is not a number."""

    def __init__(self, dtype: torch.dtype, seed: int, *, has_norms: bool) -> None:
        numbers, draw = Numbers(dtype, seed), random.Random(seed)
        self.kv_heads = draw.choice([1, 2])
        self.heads = self.kv_heads * draw.choice([1, 2, 3])
        self.size = draw.choice([8, 16, 24])
        rotary_size = draw.choice([self.size, self.size // 2])
        self.block_size, self.rows = draw.choice([4, 5]), 4
        self.qkv = numbers(self.rows, (self.heads + 2 * self.kv_heads) * self.size)
        self.norms = numbers(2, self.size) if has_norms else None
        angles = numbers(50, rotary_size).float()
        self.cosine, self.sine = angles.cos().to(dtype), angles.sin().to(dtype)
        self.positions = torch.tensor(draw.sample(range(50), self.rows), device=DEVICE)
        places = draw.sample(range(6 * self.block_size), self.rows)
        self.blocks = [place // self.block_size for place in places]
        self.offsets = [place % self.block_size for place in places]
        self.blocks[2] = -1  # a padding row
        self.dtype = dtype

    def place(self, rows: slice = slice(None)) -> tuple[torch.Tensor, LayerCache]:
        shape = (6, self.kv_heads, self.block_size, self.size)
        cache = LayerCache(
            *(torch.full(shape, float("nan"), dtype=self.dtype, device=DEVICE) for _ in range(2))
        )
        blocks, offsets = (torch.tensor(it, device=DEVICE) for it in (self.blocks, self.offsets))
        layout = StepLayout(
            num_decodes=0,
            query_starts=[],
            context_lens=[],
            block_tables=blocks.unsqueeze(1),
            write_blocks=blocks[rows],
            write_offsets=offsets[rows],
            block_size=self.block_size,
        )
        with poisoned_memory():
            query = place_heads(
                self.qkv[rows],
                self.positions[rows],
                self.cosine,
                self.sine,
                self.norms,
                EPSILON,
                cache,
                layout,
            )
        return query, cache

    def expected(self) -> tuple[torch.Tensor, LayerCache]:
        """With the library's own functions."""
        _, empty = self.place(slice(0))
        sizes = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        query, key, value = (
            part.view(1, self.rows, -1, self.size) for part in self.qkv.split(sizes, dim=1)
        )
        if self.norms is not None:
            query, key = norm_of(self.norms[0])(query), norm_of(self.norms[1])(key)
        cosine, sine = self.cosine[self.positions], self.sine[self.positions]
        turning = cosine.shape[1]
        turned = apply_rotary_pos_emb(
            query[..., :turning], key[..., :turning], cosine[None], sine[None], unsqueeze_dim=2
        )
        query, key = (
            torch.cat([first, whole[..., turning:]], dim=-1)[0]
            for first, whole in zip(turned, (query, key), strict=True)
        )
        for row, (block, offset) in enumerate(zip(self.blocks, self.offsets, strict=True)):
            if block >= 0:
                empty.key[block, :, offset], empty.value[block, :, offset] = key[row], value[0, row]
        return query, empty


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normed_rotated_and_written(
    dtype: torch.dtype, has_norms: bool, seed: int
) -> None:
    """To their places in the cache and nowhere else, a padding row's nowhere at all."""
    heads = Heads(dtype, seed, has_norms=has_norms)
    (query, cache), (expected, expected_cache) = heads.place(), heads.expected()
    check_close(query, expected)
    for found, wanted in ((cache.key, expected_cache.key), (cache.value, expected_cache.value)):
        assert torch.equal(found.isnan(), wanted.isnan())
        check_close(found.nan_to_num(0.0), wanted.nan_to_num(0.0))
    for row in range(heads.rows):
        alone, _ = heads.place(slice(row, row + 1))
        assert torch.equal(alone[0], query[row])
