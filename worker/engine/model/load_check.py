"""The check at load: whether requests in a packed step get the same logits as each alone.

There is no mask, so a layer that does not go through the seam would silently mix the requests of
a packed step. So each model, whatever its family, is checked before it serves. Packed steps of two
requests must give the logits that each request gives alone with the library's eager attention and
masks. Windows are shrunk for the check, so that a few tokens reach past them. Weights are in fp32
where memory allows, so that rounding does not hide a fault.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Sequence as Items
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from promptq.shared.errors import ConfigurationError, PromptqError, UnsupportedModelError
from promptq.shared.protocol.request import NEUTRAL
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.attention.backend import AttentionBackend, LayerSpec
from promptq.worker.engine.attention.kv_cache import KVCache
from promptq.worker.engine.attention.packed_step import Packer
from promptq.worker.engine.core.block_manager import num_blocks_for
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence
from promptq.worker.engine.device.precision import exact_products, in_float32
from promptq.worker.engine.llama.decoder import LlamaDecoder
from promptq.worker.engine.model.backend_choice import BACKENDS, NOT_ASKED_FOR, first_that_serves
from promptq.worker.engine.model.layer_specs import record_layers, shrunk_windows
from promptq.worker.engine.model.loading import LoadedModel
from promptq.worker.engine.model.packed_model import (
    PackedModel,
    RowStarts,
    leave_seam,
    set_attention,
)

_FAILURES = (TypeError, ValueError, RuntimeError, AttributeError, LookupError)

LENGTHS = (34, 14)
"""Tokens of the two requests of the check. Some of their chunks are long, and some are so short
that their rows may attend one by one."""
BLOCK_SIZE = 4

TOLERANCE = 1e-4
"""The largest difference in a row of logits, relative to the row's spread, for half of the rows.
Any row may differ ten times as much, because a near tie in a router may be decided differently in
it. In fp32, rounding causes about 1e-6."""
LOW_PRECISION_TOLERANCE = 0.1
"""The same for a model too large to be checked in fp32. bf16 rounds to 8 bits."""
ROUNDING_TOLERANCE = 0.5
"""The same for what a decoder makes of rounded weights, inputs, or K and V, once its formula was
checked. Each of many layers rounds, so that sound products are off by 0.05 in models of 40 layers,
and by 0.2 in some. Wrong ones are off by 1."""
TF32_TOLERANCE = LOW_PRECISION_TOLERANCE / 8
"""The same for fp32 where the environment forces TF32, which rounds to 11 bits."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the check of a model found that a decoder of our own serves. Another load of the same
    files on the same device need not find it anew."""

    specs: list[LayerSpec]
    backend: str
    decoder: str


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """What the check found: the attention modules in order of call, and what each asks for."""

    modules: list[nn.Module]
    specs: list[LayerSpec]
    backend: AttentionBackend
    counts_rows: bool = False
    """See PackedModel."""
    decoder: type[LlamaDecoder] | None = None
    """Our own decoder that serves the model; None: the library's modules do."""
    why_no_own_code: str = NOT_ASKED_FOR
    """Why no decoder of our own serves the model; empty if one does."""

    @property
    def is_known(self) -> bool:
        """Whether an earlier load checked it."""
        return not self.modules

    @property
    def verdict(self) -> Verdict | None:
        """None if the library's modules compute: they have to be recorded each time."""
        if self.decoder is None:
            return None
        return Verdict(self.specs, self.backend.name, self.decoder.__name__)

    def on(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        max_length: int,
        max_position: int | None = None,
        *,
        releases: bool = False,
    ) -> PackedModel | LlamaDecoder:
        """The model on this cache, for sequences of up to `max_length` tokens.

        `releases`: nobody else needs the weights any more, so those that are packed are freed.
        """
        patterns = [spec.pattern.shortened(max_length) for spec in self.specs]
        if self.decoder is not None:
            last = max_position or max_length
            return self.decoder(
                model, cache.layers, patterns, self.backend, last, releases=releases
            )
        return PackedModel(
            model, self.modules, cache.layers, patterns, self.backend, counts_rows=self.counts_rows
        )


def model_length(loaded: LoadedModel, asked: int | None) -> int | None:
    """The longest sequence that is computed correctly: `asked`, or what the model allows.

    None if nothing limits it. Raises ConfigurationError if the model has fewer positions than
    `asked`. Raises UnsupportedModelError if, at that length, its rotary embedding would make the
    positions of one sequence depend on the others in the batch.
    """
    limit: int | None = getattr(loaded.text_config, "max_position_embeddings", None)
    if asked is not None and limit is not None and asked > limit:
        raise ConfigurationError(
            f"--max-model-len: {asked} is more than the {limit} positions that {loaded.name} has"
        )
    for rope in _rope_parameters(loaded.text_config):
        kind = rope.get("rope_type")
        if kind not in ("dynamic", "longrope"):
            continue
        lengths = (rope.get("original_max_position_embeddings"), limit)
        stable = min((length for length in lengths if length), default=0)
        if asked is not None and asked > stable:
            raise UnsupportedModelError(
                f"{loaded.family}: its rotary embedding is of type {kind!r}, which changes all "
                f"positions in a batch once one sequence has more than {stable} tokens; with "
                f"--max-model-len {stable} it can be served"
            )
        limit = stable
    return limit if asked is None else asked


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary settings: one set, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        [rope] if "rope_type" in rope else [one for one in rope.values() if isinstance(one, dict)]
    )


def check_model(
    loaded: LoadedModel,
    backends: Items[AttentionBackend],
    max_length: int | None,
    *,
    decoders: Items[type[LlamaDecoder]] = (),
    why_no_own_code: str = NOT_ASKED_FOR,
    known: Verdict | None = None,
) -> CheckedModel:
    """Find out what each layer asks for, and compare packed steps with the library's attention.

    The first of the backends that knows all that the layers ask for is used. If its kernels do not
    compile, the next one is. Positions up to `max_length` are tried. The first of `decoders` that
    passes the same comparison serves the model instead of the library's modules. `why_no_own_code`
    tells why there are none to try. What is `known` from an earlier load is not checked again.
    Raises UnsupportedModelError, naming the family and the reason, if the model would not be served
    correctly. Raises ConfigurationError if the kernels of no backend compile.
    """
    left = [*backends]
    if known is not None:
        backend = next((it for it in backends if it.name == known.backend), None)
        decoder = next((it for it in decoders if it.__name__ == known.decoder), None)
        if backend is not None and decoder is not None:
            return CheckedModel([], known.specs, backend, decoder=decoder, why_no_own_code="")
    by_parts = all(decoder.unpacked for decoder in decoders)
    refused: UnsupportedModelError | None = None
    while True:
        try:
            return _check(loaded, left, max_length, decoders, why_no_own_code, by_parts, refused)
        except UnsupportedModelError as error:
            if not by_parts:
                raise (refused or error) from error.__cause__
            # A family may use the weight of a linear layer without calling it.
            refused, by_parts = error, False
        except _NotCompiledError as error:
            left.remove(error.backend)
            if not left:
                raise ConfigurationError(f"--attention: {error}{_others(error)}") from error
            logger.warning("%s; %s is tried instead", error, left[0].name)


def check_quantized(loaded: LoadedModel, checked: CheckedModel, asked: str) -> None:
    """Compare our own decoder of a model whose weights or KV cache are rounded now with the
    library's model, which computes with what the weights stand for. The formula was checked before.

    `asked` are the options that asked for it; empty: the files did. Raises UnsupportedModelError.
    """
    probes = _decoder_probes(loaded, model_length(loaded, None))
    with torch.inference_mode():
        _require_alike(loaded, _compare(loaded, checked, probes, ROUNDING_TOLERANCE), asked)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What packed weights are compared with."""

    probes: list[_Probe]
    logits: torch.Tensor  # [tokens of all probes, vocab_size]

    @classmethod
    def of(
        cls, loaded: LoadedModel, checked: CheckedModel, cache: KVCache, max_length: int
    ) -> Expectation | None:
        """From the formula in fp32 on the weights as they are, which was checked before. The model
        is to serve sequences of up to `max_length` tokens on the cache. None if there is too little
        memory even for that."""
        assert checked.decoder is not None, "code of our own packs weights"
        most = cache.num_blocks // len(LENGTHS) * cache.block_size
        probes = [
            replace(it, token_ids=it.token_ids[:most]) for it in _decoder_probes(loaded, max_length)
        ]
        specs = [spec.in_float32() for spec in checked.specs]
        formula = replace(checked, decoder=checked.decoder.unpacked, specs=specs)
        with torch.inference_mode(), in_float32(loaded.model, by_parts=True) as is_float32:
            if not is_float32:
                return None
            return cls(probes, torch.cat(_packed(loaded, formula, probes)))


def check_packed(
    loaded: LoadedModel, decoder: LlamaDecoder, cache: KVCache, expected: Expectation, asked: str
) -> None:
    """Compare a decoder that has packed the weights, on its cache that is not used yet.

    `asked` is as above. Raises UnsupportedModelError.
    """
    is_exact = loaded.model.dtype == torch.float32 and not (asked or loaded.format)
    tolerance = TOLERANCE if is_exact else ROUNDING_TOLERANCE
    with torch.inference_mode():
        logits = torch.cat(_run(decoder, cache, expected.probes, loaded.model.device)).float()
    _require_alike(loaded, _difference(logits, expected.logits, tolerance), asked)


def _require_alike(loaded: LoadedModel, difference: _Difference, asked: str) -> None:
    if difference.is_tolerable:
        return
    by = f"{difference.median:.2g} of their spread in half of the rows"
    if what := asked or loaded.format:
        raise UnsupportedModelError(
            f"{loaded.family}: {what} changes logits by {by}, beside what rounded weights change;"
            f" {'leave it out' if asked else 'use --no-native'}"
        )
    raise UnsupportedModelError(
        f"{loaded.family}: the products of native code change logits by {by} on this processor; use"
        " --no-native"
    )


class _NotCompiledError(Exception):
    """A backend's kernels do not compile here."""

    def __init__(self, backend: AttentionBackend, cause: BaseException) -> None:
        while cause.__cause__ is not None:  # in a function that the kernel calls
            cause = cause.__cause__
        lines = getattr(cause, "error_message", None) or str(cause)  # the former without the source
        reason = f"{type(cause).__name__}: {lines.strip().split(chr(10))[0]}"
        super().__init__(f"the kernels of {backend.name} do not compile here ({reason})")
        self.backend = backend


def _others(error: _NotCompiledError) -> str:
    names = [each.name for each in BACKENDS if each.name != error.backend.name and not each.needs]
    return "".join(f"; --attention {name} needs no compiler" for name in names)


def _check(
    loaded: LoadedModel,
    backends: Items[AttentionBackend],
    max_length: int | None,
    decoders: Items[type[LlamaDecoder]],
    why_no_own_code: str,
    by_parts: bool,
    refused: UnsupportedModelError | None,
) -> CheckedModel:
    """`by_parts`: see in_float32. What was `refused` for its logits passes in fp32 only."""
    family, model = loaded.family, loaded.model
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError(
            f"{family}: takes no position_ids, so requests cannot share a packed step"
        )
    try:
        with torch.inference_mode(), shrunk_windows(model) as true_patterns:
            probes = _probes(loaded, max_length)
            _, specs = record_layers(loaded, probes[0].token_ids, true_patterns)
            backend = first_that_serves(family, backends, specs)
            takes_float32 = torch.float32 in backend.dtypes
            with (
                exact_products(model.device) as multiplies_exactly,
                in_float32(model, by_parts=by_parts)
                if takes_float32
                else nullcontext(False) as is_float32,
            ):
                if refused is not None and refused.__cause__ is None and not is_float32:
                    raise refused
                is_exact = is_float32 and multiplies_exactly
                tolerance = _tolerance(is_float32, multiplies_exactly)
                modules, specs_now = record_layers(loaded, probes[0].token_ids, true_patterns)
                # Without fp32, rounding might hide that a family counts rows: RowStarts come first.
                differences = {}
                for counts_rows in (not is_exact, is_exact):
                    checked = CheckedModel(
                        modules, specs_now, backend, counts_rows, why_no_own_code=why_no_own_code
                    )
                    difference = _compare(loaded, checked, probes, tolerance)
                    differences[counts_rows] = difference
                    if difference.is_tolerable:
                        break
                if decoders and difference.is_tolerable:
                    by_parts = by_parts and is_float32
                    checked = _with_decoder(
                        loaded, checked, decoders, max_length, tolerance, by_parts
                    )
    except _FAILURES as error:
        raise UnsupportedModelError(
            f"{family}: a packed step does not run: {type(error).__name__}: {error}"
        ) from error
    if not difference.is_tolerable:
        plain = differences[False]
        raise UnsupportedModelError(
            f"{family}: requests in a packed step do not get the same logits as alone (they are "
            f"off by {plain.median:.2g} of their spread in half of the rows, by {plain.worst:.2g} "
            "in one)"
        )
    true_specs = [replace(spec, pattern=true_patterns[spec.pattern]) for spec in specs]
    return replace(checked, specs=true_specs)


def _with_decoder(
    loaded: LoadedModel,
    checked: CheckedModel,
    decoders: Items[type[LlamaDecoder]],
    max_length: int | None,
    tolerance: float,
    by_parts: bool,
) -> CheckedModel:
    """`checked` with the first of our decoders that passes, or with the reasons why none does.

    `by_parts`: weights are in fp32 only while they are used, so the formula is checked unpacked.
    """
    probes = _decoder_probes(loaded, max_length)
    reasons = []
    for decoder in decoders:
        passed = replace(checked, decoder=decoder, why_no_own_code="")
        tried = replace(passed, decoder=decoder.unpacked) if by_parts else passed
        try:
            difference = _compare(loaded, tried, probes, tolerance)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # also those of Triton's compiler
            reasons.append(str(error).split("\n")[0])
            continue
        if difference.is_tolerable:
            return passed
        reasons.append(f"its logits are off by {difference.median:.2g} of their spread")
    return replace(checked, why_no_own_code="; ".join(reasons))


_DECODER_POSITIONS = 1024
"""The most positions that a decoder of our own is tried with. This is enough, because its table of
positions comes from the model's own module."""


@dataclass(frozen=True, slots=True)
class _Probe:
    token_ids: list[int]
    first_position: int


def _probes(loaded: LoadedModel, max_length: int | None) -> list[_Probe]:
    """Two requests. The second lies at the end of the model's positions, to show that the model
    uses the positions it is given."""
    vocab_size = loaded.text_config.vocab_size
    last = max_length or 1024
    probes = []
    for length, first_position in zip(LENGTHS, (0, max(0, last - LENGTHS[1])), strict=True):
        salt = 13 + first_position
        ids = [3 + (salt + 7919 * index) % max(1, vocab_size // 2 - 3) for index in range(length)]
        probes.append(_Probe(ids[:last], first_position))
    return probes


def _decoder_probes(loaded: LoadedModel, max_length: int | None) -> list[_Probe]:
    return _probes(loaded, min(max_length or _DECODER_POSITIONS, _DECODER_POSITIONS))


def _alone(loaded: LoadedModel, probe: _Probe, counts_rows: bool) -> torch.Tensor:
    """[length, vocab_size]: the logits with the library's own attention and masks."""
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


def _packed(loaded: LoadedModel, checked: CheckedModel, probes: list[_Probe]) -> list[torch.Tensor]:
    """The same from packed steps, on a cache of their own."""
    device = loaded.model.device
    blocks_each = num_blocks_for(max(len(probe.token_ids) for probe in probes), BLOCK_SIZE)
    num_blocks = len(probes) * blocks_each
    cache = KVCache(checked.specs, num_blocks=num_blocks, block_size=BLOCK_SIZE, device=device)
    for layer in cache.layers:
        for part in (layer.key, layer.value):
            # In int8, a scale of such bytes is NaN.
            part.fill_(255 if part.dtype == torch.uint8 else float("nan"))
    last = max(probe.first_position for probe in probes) + max(LENGTHS)
    return _run(checked.on(loaded.model, cache, max(LENGTHS) + 1, last), cache, probes, device)


def _run(
    model: PackedModel | LlamaDecoder, cache: KVCache, probes: list[_Probe], device: torch.device
) -> list[torch.Tensor]:
    """Of each probe [length, vocab_size]: its logits from three packed steps: a chunk of each
    request, another chunk, then a decode."""
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


def _tolerance(is_float32: bool, multiplies_exactly: bool) -> float:
    if not is_float32:
        return LOW_PRECISION_TOLERANCE
    if multiplies_exactly:
        return TOLERANCE
    logger.warning(
        "products in fp32 are rounded to TF32 here, whatever torch asks for"
        " (NVIDIA_TF32_OVERRIDE=%s), so the check at load compares to %g only and not to %g",
        os.environ.get("NVIDIA_TF32_OVERRIDE", ""),
        TF32_TOLERANCE,
        TOLERANCE,
    )
    return TF32_TOLERANCE


def _compare(
    loaded: LoadedModel,
    checked: CheckedModel,
    probes: list[_Probe],
    tolerance: float,
) -> _Difference:
    """How far the logits of packed steps are from those of each request alone."""
    set_attention(loaded.model, "eager")
    try:
        alone = torch.cat([_alone(loaded, probe, checked.counts_rows) for probe in probes]).float()
        packed = torch.cat(_packed(loaded, checked, probes)).float()
    except (*_FAILURES, UnsupportedModelError):
        if checked.counts_rows:  # not every family accepts RowStarts
            return _Difference(math.nan, math.nan, tolerance)
        raise
    except PromptqError:
        raise
    except Exception as error:  # those of Triton's compiler have no kind of their own
        if checked.decoder is not None:
            raise
        raise _NotCompiledError(checked.backend, error) from error
    finally:
        leave_seam(checked.modules)  # or they would keep the cache of the check
    return _difference(packed, alone, tolerance)


def off_by(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """[rows]: how far each row of logits is off, relative to the spread of the expected."""
    spread = (expected - expected.mean(dim=1, keepdim=True)).norm(dim=1)
    off: torch.Tensor = (logits - expected).norm(dim=1) / spread.clamp_min(1e-20)
    return off


def _difference(logits: torch.Tensor, expected: torch.Tensor, tolerance: float) -> _Difference:
    off = off_by(logits, expected)
    return _Difference(float(off.median()), float(off.max()), tolerance)


@dataclass(frozen=True, slots=True)
class _Difference:
    """How far logits are off, relative to a row's spread."""

    median: float
    worst: float
    tolerance: float

    @property
    def is_tolerable(self) -> bool:
        # NaN compares as false, so it is not tolerable.
        return self.median <= self.tolerance and self.worst <= 10 * self.tolerance
