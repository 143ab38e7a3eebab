"""Checks a decoder with rounded or packed weights. An earlier check (formula.py) has shown that,
without rounding, the decoder computes the same as the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import torch

from promptq.shared.errors import UnsupportedModelError
from promptq.worker.engine.attention.kv_cache import KVCache
from promptq.worker.engine.decoders.base import Decoder
from promptq.worker.engine.device.precision import in_float32
from promptq.worker.engine.load_check.checked_model import CheckedModel
from promptq.worker.engine.load_check.comparison import (
    LENGTHS,
    ROUNDING_TOLERANCE,
    TOLERANCE,
    Difference,
    Probe,
    compare,
    decoder_probes,
    difference_of,
    packed_logits,
    run_steps,
    why_not_finite,
)
from promptq.worker.engine.model.loading import LoadedModel
from promptq.worker.engine.model.model_length import model_length


def check_quantized(loaded: LoadedModel, checked: CheckedModel, options: str) -> None:
    """Compare promptq's decoder, with rounded weights or KV cache, with transformers' model.

    transformers' model computes with the dequantized weights. Call this after `check_model` has
    shown that the decoder is right without rounding. `options` names the options that cause
    rounding; `options` is empty if the files are quantized. Raises UnsupportedModelError if the
    logits differ more than rounding explains.
    """
    probes = decoder_probes(loaded, model_length(loaded, None))
    with torch.inference_mode():
        _require_alike(loaded, compare(loaded, checked, probes, ROUNDING_TOLERANCE), options)


@dataclass(frozen=True, slots=True)
class Expectation:
    """The logits that packed weights must produce."""

    probes: list[Probe]
    logits: torch.Tensor  # [tokens of all probes, vocab_size]

    @classmethod
    def of(
        cls, loaded: LoadedModel, checked: CheckedModel, cache: KVCache, max_length: int
    ) -> Expectation | None:
        """Returns the expected logits, computed in fp32 with the unpacked weights; None if there is
        too little memory.

        `checked` is the result of `check_model`, which tested the decoder without rounding. The
        model will serve up to `max_length` tokens on `cache`.
        """
        assert checked.decoder is not None, "only promptq's decoders pack weights"
        most = cache.num_blocks // len(LENGTHS) * cache.block_size
        probes = [
            replace(probe, token_ids=probe.token_ids[:most])
            for probe in decoder_probes(loaded, max_length)
        ]
        specs = [spec.in_float32() for spec in checked.specs]
        formula = replace(checked, decoder=checked.decoder.unpacked, specs=specs)
        with torch.inference_mode(), in_float32(loaded.model, by_parts=True) as is_float32:
            if not is_float32:
                return None
            return cls(probes, torch.cat(packed_logits(loaded, formula, probes)))


def check_packed(
    loaded: LoadedModel, decoder: Decoder, cache: KVCache, expected: Expectation, options: str
) -> None:
    """Check the logits of a decoder that has packed its weights. `cache` must be unused. `options`
    names the options that cause rounding. Raises UnsupportedModelError if the logits differ from
    `expected` more than rounding explains."""
    is_exact = loaded.model.dtype == torch.float32 and not (options or loaded.format)
    tolerance = TOLERANCE if is_exact else ROUNDING_TOLERANCE
    # Recurrent layers may have states for a single sequence.
    has_one_slot = decoder.states is not None and decoder.states.num_slots < len(expected.probes)
    groups = [[probe] for probe in expected.probes] if has_one_slot else [expected.probes]
    with torch.inference_mode():
        rows = [run_steps(decoder, cache, group, loaded.model.device) for group in groups]
        logits = torch.cat([*chain(*rows)]).float()
    _require_alike(loaded, difference_of(logits, expected.logits, tolerance), options)


def _require_alike(loaded: LoadedModel, difference: Difference, options: str) -> None:
    if difference.is_tolerable:
        return
    if not difference.is_finite_alone:
        raise UnsupportedModelError(
            f"{loaded.family}: logits are not finite: {why_not_finite(loaded.model)}"
        )
    by = f"{difference.median:.2g} of their spread in half of the rows"
    if what := options or loaded.format:
        raise UnsupportedModelError(
            f"{loaded.family}: {what} changes logits by {by}, more than rounded weights explain;"
            f" {'leave it out' if options else 'use --no-native'}"
        )
    raise UnsupportedModelError(
        f"{loaded.family}: the products of native code change logits by {by} on this processor; use"
        " --no-native"
    )
