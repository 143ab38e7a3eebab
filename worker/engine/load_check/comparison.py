"""Compares the logits of packed steps with the logits of each request alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from promptq.shared.errors import PromptqError, UnsupportedModelError
from promptq.shared.protocol.request import NEUTRAL
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.attention.backend import AttentionBackend
from promptq.worker.engine.attention.kv_cache import KVCache
from promptq.worker.engine.attention.packed_step import Packer
from promptq.worker.engine.core.block_manager import num_blocks_for
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence
from promptq.worker.engine.decoders.base import Decoder
from promptq.worker.engine.load_check.checked_model import CheckedModel
from promptq.worker.engine.model.loading import LoadedModel
from promptq.worker.engine.model.packed_model import PackedModel, RowStarts, set_attention

FAILURES = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, ArithmeticError)
"""Exceptions that transformers' modules raise if they cannot compute packed steps."""

LENGTHS = (34, 14)
"""The lengths, in tokens, of the check's two requests. The steps have both long and short chunks,
because attention may have separate code for chunks of a few rows."""
BLOCK_SIZE = 4

TOLERANCE = 1e-4
"""The largest allowed difference between logits: the median of all rows' differences, each divided
by the row's spread. A single row may differ ten times as much, because a router may decide a near
tie differently. In fp32, rounding causes about 1e-6."""
LOW_PRECISION_TOLERANCE = 0.1
"""Tolerance for a model that is too large to be checked in fp32. bf16 rounds to 8 bits."""
ROUNDING_TOLERANCE = 0.5
"""Tolerance for a decoder with rounded weights, inputs, or K and V, after a check without rounding.
Each layer rounds, so correct products are off by 0.05 in models of 40 layers, and by 0.2 in some
models. Wrong products are off by 1."""
TF32_TOLERANCE = LOW_PRECISION_TOLERANCE / 8
"""Tolerance in fp32 if the environment forces TF32, which rounds to 11 bits."""

_DECODER_POSITIONS = 1024
"""The largest position in tests of promptq's decoders. Larger positions need no test: the decoders'
tables for rotary positions come from the model's module, and decoders refuse a layer that uses
positions in another way."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A request that the check computes."""

    token_ids: list[int]
    first_position: int


def probes_of(loaded: LoadedModel, max_length: int | None) -> list[Probe]:
    """Returns two requests. The second request ends at the last of `max_length` positions (None: of
    1024). So the check shows whether the model uses the positions in its input."""
    vocab_size = loaded.text_config.vocab_size
    last = max_length or 1024
    probes = []
    for length, first_position in zip(LENGTHS, (0, max(0, last - LENGTHS[1])), strict=True):
        salt = 13 + first_position
        ids = [3 + (salt + 7919 * index) % max(1, vocab_size // 2 - 3) for index in range(length)]
        probes.append(Probe(ids[:last], first_position))
    return probes


def decoder_probes(loaded: LoadedModel, max_length: int | None) -> list[Probe]:
    """Returns the two requests that test promptq's decoders."""
    return probes_of(loaded, min(max_length or _DECODER_POSITIONS, _DECODER_POSITIONS))


def _alone(loaded: LoadedModel, probe: Probe, counts_rows: bool) -> torch.Tensor:
    """Returns a request's logits [length, vocab_size] by transformers' attention and masks."""
    device = loaded.model.device
    positions = torch.arange(len(probe.token_ids), device=device).unsqueeze(0)
    positions += probe.first_position
    further: dict[str, Any] = {}
    if counts_rows and probe.first_position:
        further["past_key_values"] = RowStarts(positions)
    logits: torch.Tensor = loaded.model(
        input_ids=torch.tensor([probe.token_ids], device=device),
        position_ids=positions,
        use_cache=False,
        **further,
    ).logits
    return logits[0]


def packed_logits(
    loaded: LoadedModel, checked: CheckedModel, probes: list[Probe]
) -> list[torch.Tensor]:
    """Returns each probe's logits [length, vocab_size], computed in packed steps on a new cache."""
    device = loaded.model.device
    blocks_each = num_blocks_for(max(len(probe.token_ids) for probe in probes), BLOCK_SIZE)
    num_blocks = len(probes) * blocks_each
    cache = KVCache(checked.specs, num_blocks=num_blocks, block_size=BLOCK_SIZE, device=device)
    for layer in cache.layers:
        for part in (layer.key, layer.value):
            # In int8, a scale of such bytes is NaN.
            part.fill_(255 if part.dtype == torch.uint8 else float("nan"))
    last = max(probe.first_position for probe in probes) + max(LENGTHS)
    model = checked.on(loaded.model, cache, max(LENGTHS) + 1, last, num_slots=len(probes))
    return run_steps(model, cache, probes, device)


def run_steps(
    model: PackedModel | Decoder, cache: KVCache, probes: list[Probe], device: torch.device
) -> list[torch.Tensor]:
    """Returns each probe's logits [length, vocab_size], computed in three packed steps: a chunk of
    each request, another chunk, then a decode."""
    packer = Packer(cache.block_size, device)
    sequences = []
    for index, probe in enumerate(probes):
        request = EngineRequest(index, probe.token_ids, NEUTRAL, seed=0, max_tokens=1)
        sequence = Sequence.of(request)
        sequence.slot = index
        sequence.block_table = list(range(index, cache.num_blocks, len(probes)))[::-1]
        sequences.append(sequence)

    rows: list[list[torch.Tensor]] = [[] for _ in probes]
    for step in range(3):
        scheduled = []
        for sequence in reversed(sequences):
            total = sequence.num_tokens
            cuts = (0, total * 6 // 10, total - 1, total)
            if count := cuts[step + 1] - cuts[step]:
                scheduled.append(ScheduledSequence(sequence, cuts[step], count, samples=False))
        if not scheduled:
            continue
        packed = packer.pack(Batch(scheduled))
        starts = packed.layout.query_starts
        for item, first, last in zip(packed.items, starts[:-1], starts[1:], strict=True):
            packed.positions[0, first:last] += probes[item.sequence.sequence_id].first_position
        logits = model.logits(packed, torch.arange(starts[-1], device=device))
        for item, first, last in zip(packed.items, starts[:-1], starts[1:], strict=True):
            rows[item.sequence.sequence_id].append(logits[first:last])
    return [torch.cat(parts) for parts in rows]


def is_finite_alone(loaded: LoadedModel, checked: CheckedModel, probe: Probe) -> bool:
    """Whether transformers' logits of a single request are finite in the model's dtype."""
    set_attention(loaded.model, "eager")
    return bool(torch.isfinite(_alone(loaded, probe, checked.counts_rows)).all())


def compare(
    loaded: LoadedModel, checked: CheckedModel, probes: list[Probe], tolerance: float
) -> Difference:
    """Returns the difference between logits of packed steps and logits of each single request.
    Raises NotCompiledError if the kernels of the attention backend do not compile."""
    set_attention(loaded.model, "eager")
    try:
        alone = torch.cat([_alone(loaded, probe, checked.counts_rows) for probe in probes]).float()
        packed = torch.cat(packed_logits(loaded, checked, probes)).float()
    except (*FAILURES, UnsupportedModelError):
        if checked.counts_rows:  # not every family accepts RowStarts
            return Difference(math.nan, math.nan, tolerance)
        raise
    except Exception as error:  # exceptions of Triton's compiler share no class
        if checked.decoder is not None or isinstance(error, PromptqError):
            raise
        raise NotCompiledError(checked.backend, error) from error
    finally:
        checked.leave()  # otherwise its modules keep this cache in memory
    return difference_of(packed, alone, tolerance)


def off_by(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Returns [rows]: the root mean square difference between each row and the expected row,
    divided by the standard deviation of the expected row."""
    spread = (expected - expected.mean(dim=1, keepdim=True)).norm(dim=1)
    off: torch.Tensor = (logits - expected).norm(dim=1) / spread.clamp_min(1e-20)
    return off


def difference_of(logits: torch.Tensor, expected: torch.Tensor, tolerance: float) -> Difference:
    off = off_by(logits, expected)
    is_finite = bool(torch.isfinite(expected).all())
    return Difference(float(off.median()), float(off.max()), tolerance, is_finite)


@dataclass(frozen=True, slots=True)
class Difference:
    """The median and the largest of the rows' differences (see `off_by`)."""

    median: float
    worst: float
    tolerance: float
    is_finite_alone: bool = True
    """Whether the logits of each single request are finite."""

    @property
    def is_tolerable(self) -> bool:
        # A NaN fails here, because each comparison with NaN is false.
        return self.median <= self.tolerance and self.worst <= 10 * self.tolerance


def why_not_finite(model: PreTrainedModel) -> str:
    """Returns the reason why logits are not finite, and advice."""
    dtype = str(model.dtype).removeprefix("torch.")
    for name, weight in model.named_parameters():
        if weight.is_meta or bool(torch.isfinite(weight).all()):
            continue
        if bool(torch.isnan(weight).any()) or model.dtype != torch.float16:
            why = "holds NaN or infinity; its files are damaged, fetch them again"
            return f"the weight {name} {why}"
        return f"the weight {name} is too large for {dtype}; use --dtype bfloat16 or float32"
    if model.dtype == torch.float32:
        return "its numbers overflow even in float32; its files are damaged, fetch them again"
    others = "float32" if model.dtype == torch.bfloat16 else "bfloat16 or float32"
    return f"its numbers overflow in {dtype}; use --dtype {others}"


class NotCompiledError(Exception):
    """Raised if the kernels of a backend do not compile here."""

    def __init__(self, backend: AttentionBackend, cause: BaseException) -> None:
        while cause.__cause__ is not None:  # in a function that the kernel calls
            cause = cause.__cause__
        lines = getattr(cause, "error_message", None) or str(cause)  # the former without the source
        reason = f"{type(cause).__name__}: {lines.strip().split(chr(10))[0]}"
        super().__init__(f"the kernels of {backend.name} do not compile here ({reason})")
        self.backend = backend
