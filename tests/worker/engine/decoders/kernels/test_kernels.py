"""Each fused kernel in Triton's interpreter, or with TRITON_INTERPRET=0 on a GPU."""

from __future__ import annotations

import os
import random
from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton is not installed here", allow_module_level=True)
DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")

from benchmarks.gpu.cases import off_by, poisoned_memory
from promptq.worker.engine.attention.types import LayerCache, StepLayout
from promptq.worker.engine.decoders.expert_parts import Limits
from promptq.worker.engine.decoders.kernels.activation import TILE, Activation
from promptq.worker.engine.decoders.kernels.heads import HeadNorms, place_heads
from promptq.worker.engine.decoders.kernels.norm import add_norm, norm_columns
from promptq.worker.engine.decoders.mlp_parts import ACTIVATIONS
from promptq.worker.engine.decoders.norm_parts import RMS_NORM, Norm, NormFormula
from promptq.worker.engine.decoders.rotation_parts import RotationTables

EPSILON = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Numbers:
    """Random tensors of one dtype."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self._dtype, self._generator = dtype, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(DEVICE, self._dtype)


FORMULAS = [
    RMS_NORM,
    NormFormula(is_centered=False, adds_one=True, rounds_twice=False),
    NormFormula(is_centered=True, adds_one=False, rounds_twice=False),
    NormFormula(is_centered=True, adds_one=True, rounds_twice=False),
]


def norm_of(numbers: Numbers, size: int, formula: NormFormula) -> Norm:
    """Centered norms have a bias."""
    bias = numbers(size) if formula.is_centered else None
    return Norm(numbers(size), bias, EPSILON, formula)


def normed(norm: Norm, x: torch.Tensor) -> torch.Tensor:
    return norm.formula(x, norm.weight, norm.bias, norm.epsilon)


def assert_rounded_alike(found: torch.Tensor, expected: torch.Tensor, times: float = 4) -> None:
    """Rounded in the same places, so that a sum in another order changes few numbers' last bit.

    The interpreter cuts bf16 numbers off where a card rounds them.
    """
    assert found.dtype == expected.dtype
    if found.dtype == torch.bfloat16 and DEVICE.type == "cpu":
        assert off_by(found, expected.double()) < 0.02
        return
    eps = torch.finfo(found.dtype).eps
    if found.dtype == torch.float32:
        times *= 4  # no rounding hides the error of a sum in another order
    else:
        assert (found == expected).float().mean() > 1 - 0.0075 * times
    torch.testing.assert_close(found, expected, rtol=times * eps, atol=times * eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_sum(dtype: torch.dtype, seed: int) -> None:
    """The sum is in `hidden` afterwards, and each row has the bits that it has alone."""
    draw = random.Random(seed)
    for formula in FORMULAS:
        numbers, size = Numbers(dtype, seed), draw.choice([16, 100, 1000])
        hidden_before, norm, update = numbers(5, size), norm_of(numbers, size, formula), None
        after, scale = draw.choice([None, norm_of(numbers, size, draw.choice(FORMULAS))]), 1.0
        if formula != FORMULAS[1]:
            update, scale = numbers(5, size), draw.choice([1.0, 0.3])
        hidden = hidden_before.clone()
        with poisoned_memory():
            found = add_norm(hidden, update, norm, after, scale)
        expected = hidden_before
        if update is not None:
            added = update if after is None else normed(after, update)
            expected = expected + (added if scale == 1.0 else added * scale)
        # The mean of the second norm is itself a sum in another order.
        assert_rounded_alike(hidden, expected, times=4 if after is None else 8)
        assert_rounded_alike(found, normed(norm, hidden))
        for row in range(5):
            alone = None if update is None else update[row : row + 1]
            one = add_norm(hidden_before[row : row + 1].clone(), alone, norm, after, scale)
            assert torch.equal(one[0], found[row])


def test_a_sum_without_a_norm(seed: int) -> None:
    numbers = Numbers(torch.float32, seed)
    hidden, update = numbers(3, 20), numbers(3, 20)
    expected = hidden + 0.5 * update
    assert add_norm(hidden, update, None, None, 0.5) is hidden
    assert_rounded_alike(hidden, expected)
    assert add_norm(hidden, None, None) is hidden
    assert_rounded_alike(hidden, expected)


def test_norm_of_some_columns(seed: int) -> None:
    numbers = Numbers(torch.float32, seed)
    rows, norm = numbers(4, 50), norm_of(numbers, 24, RMS_NORM)
    expected = rows.clone()
    expected[:, 8:32] = normed(norm, rows[:, 8:32])
    norm_columns(rows[:, 8:32], norm)
    assert_rounded_alike(rows, expected)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(name: str, dtype: torch.dtype, seed: int) -> None:
    draw = random.Random(seed)
    for size in (draw.randrange(1, 200), TILE + 3):
        inputs = 3 * Numbers(dtype, seed)(3, 2 * size)
        inputs[0, 0], inputs[1, 0] = -80.0, 80.0
        is_interleaved = draw.random() < 0.5
        with poisoned_memory():
            found = Activation(name, is_interleaved=is_interleaved)(inputs)
            alone = Activation(name, is_gated=False)(inputs)
        gate, up = inputs.chunk(2, dim=1)
        if is_interleaved:
            gate, up = inputs[:, ::2], inputs[:, 1::2]
        times = 40 if name.startswith("gelu") else 4  # of far negative numbers little is left
        assert_rounded_alike(found, ACTIVATIONS[name](gate.float()).to(dtype) * up, times)
        assert_rounded_alike(alone, ACTIVATIONS[name](inputs.float()).to(dtype), times)
        one = Activation(name, is_interleaved=is_interleaved)(inputs[1:2])
        assert torch.equal(one[0], found[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_limited_gates(dtype: torch.dtype, seed: int) -> None:
    inputs, limits = 3 * Numbers(dtype, seed)(3, 40), Limits(1.7, 2.5)
    found = Activation("silu", is_interleaved=True, limits=limits)(inputs)
    wide = inputs.float()
    assert_rounded_alike(found, limits.gated(wide[:, ::2], wide[:, 1::2]).to(dtype))


class Heads:
    """A layer's projections, and a cache in which all is not a number."""

    def __init__(self, dtype: torch.dtype, seed: int, formula: NormFormula | None) -> None:
        numbers, draw = Numbers(dtype, seed), random.Random(seed)
        self.kv_heads = draw.choice([1, 2])
        self.heads = self.kv_heads * draw.choice([1, 2, 3])
        self.size = draw.choice([8, 16, 24])
        pairs = draw.choice([self.size, self.size // 2, 0]) // 2
        self.block_size, self.rows = draw.choice([4, 5]), 4
        self.qkv = numbers(self.rows, (self.heads + 2 * self.kv_heads) * self.size)
        self.norms: tuple[Norm, Norm] | None = None
        if formula is not None:
            self.norms = (
                norm_of(numbers, self.size, formula),
                norm_of(numbers, self.size, formula),
            )
        self.norms_follow = draw.random() < 0.5
        angles, self.tables = numbers(50, pairs).float(), None
        if pairs:
            is_interleaved = draw.random() < 0.5
            cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
            self.tables = RotationTables(cosine, sine, is_interleaved)
        print(f"{self.norms_follow = } {self.tables = }")
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
        norms = None
        if self.norms is not None:
            norms = HeadNorms.of(*self.norms, follow_rotation=self.norms_follow)
        with poisoned_memory():
            query = place_heads(
                self.qkv[rows], self.positions[rows], self.tables, norms, cache, layout
            )
        return query, cache

    def expected(self) -> tuple[torch.Tensor, LayerCache]:
        _, empty = self.place(slice(0))
        sizes = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        query, key, value = (
            part.view(self.rows, -1, self.size) for part in self.qkv.split(sizes, dim=1)
        )
        if self.norms is not None and not self.norms_follow:
            query, key = normed(self.norms[0], query), normed(self.norms[1], key)
        query, key = self.rotated(query), self.rotated(key)
        if self.norms is not None and self.norms_follow:
            query, key = normed(self.norms[0], query), normed(self.norms[1], key)
        for row, (block, offset) in enumerate(zip(self.blocks, self.offsets, strict=True)):
            if block >= 0:
                empty.key[block, :, offset], empty.value[block, :, offset] = key[row], value[row]
        return query, empty

    def rotated(self, heads: torch.Tensor) -> torch.Tensor:
        if self.tables is None:
            return heads
        cosine, sine = self.tables.cosine[self.positions], self.tables.sine[self.positions]
        turning = 2 * cosine.shape[1]
        tables = RotationTables(cosine[:, None], sine[:, None], self.tables.is_interleaved)
        return torch.cat([tables.rotated(heads[..., :turning]), heads[..., turning:]], dim=-1)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("formula", [None, *FORMULAS], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normed_rotated_and_written(
    dtype: torch.dtype, formula: NormFormula | None, seed: int
) -> None:
    """To their places in the cache and nowhere else, a padding row's nowhere at all."""
    heads = Heads(dtype, seed, formula)
    (query, cache), (expected, expected_cache) = heads.place(), heads.expected()
    assert_rounded_alike(query, expected)
    for found, wanted in ((cache.key, expected_cache.key), (cache.value, expected_cache.value)):
        assert torch.equal(found.isnan(), wanted.isnan())
        assert_rounded_alike(found.nan_to_num(0.0), wanted.nan_to_num(0.0))
    for row in range(heads.rows):
        alone, _ = heads.place(slice(row, row + 1))
        assert torch.equal(alone[0], query[row])
