"""Checks that packed steps compute the same as the model. Chooses attention backend and decoder."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Sequence as Items
from contextlib import nullcontext
from dataclasses import replace

import torch

from promptq.shared.errors import ConfigurationError, UnsupportedModelError
from promptq.worker.engine.attention.backend import AttentionBackend
from promptq.worker.engine.decoders.base import Decoder
from promptq.worker.engine.device.precision import exact_products, in_float32
from promptq.worker.engine.load_check.checked_model import CheckedModel, Verdict
from promptq.worker.engine.load_check.comparison import (
    FAILURES,
    LOW_PRECISION_TOLERANCE,
    ROUNDING_TOLERANCE,
    TF32_TOLERANCE,
    TOLERANCE,
    NotCompiledError,
    compare,
    decoder_probes,
    is_finite_alone,
    probes_of,
    why_not_finite,
)
from promptq.worker.engine.model.backend_choice import BACKENDS, TURNED_OFF, first_that_serves
from promptq.worker.engine.model.layer_specs import record_layers, shrunk_windows
from promptq.worker.engine.model.loading import LoadedModel
from promptq.worker.engine.recurrent.recognition import mixers_of

logger = logging.getLogger(__name__)


def check_model(
    loaded: LoadedModel,
    backends: Items[AttentionBackend],
    max_length: int | None,
    *,
    decoders: Items[type[Decoder]] = (),
    why_no_own_code: str = TURNED_OFF,
    known: Verdict | None = None,
) -> CheckedModel:
    """Record the layers' specs, and compare packed steps with transformers' attention.

    Chooses the first backend that supports all specs and whose kernels compile. Tests positions up
    to `max_length`. The first of `decoders` that passes the same comparison serves the model in
    place of transformers' modules. If `decoders` is empty, `why_no_own_code` says why. `known` is a
    verdict of an earlier load, and is not checked again. Raises UnsupportedModelError, with family
    and reason, if promptq would serve the model wrongly. Raises ConfigurationError if no backend's
    kernels compile.
    """
    left = [*backends]
    if known is not None:
        backend = next((each for each in backends if each.name == known.backend), None)
        decoder = next((each for each in decoders if each.__name__ == known.decoder), None)
        if backend is not None and decoder is not None:
            return CheckedModel(
                [],
                known.specs,
                backend,
                mixers=(*mixers_of(loaded.model),),
                decoder=decoder,
                why_no_own_code="",
                is_known=True,
            )
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
        except NotCompiledError as error:
            left.remove(error.backend)
            if not left:
                raise ConfigurationError(f"--attention: {error}{_others(error)}") from error
            logger.warning("%s; %s is tried instead", error, left[0].name)


def _others(error: NotCompiledError) -> str:
    names = [each.name for each in BACKENDS if each.name != error.backend.name and not each.needs]
    return "".join(f"; --attention {name} needs no compiler" for name in names)


def _check(
    loaded: LoadedModel,
    backends: Items[AttentionBackend],
    max_length: int | None,
    decoders: Items[type[Decoder]],
    why_no_own_code: str,
    by_parts: bool,
    refused: UnsupportedModelError | None,
) -> CheckedModel:
    """Check a model once. `by_parts`: see `in_float32`; `refused`: an earlier check's error."""
    family, model = loaded.family, loaded.model
    mixers = mixers_of(model)
    # Recurrent layers know positions from their states.
    if "position_ids" not in inspect.signature(model.forward).parameters and not mixers:
        raise UnsupportedModelError(
            f"{family}: takes no position_ids, so requests cannot share a packed step"
        )
    try:
        with torch.inference_mode(), shrunk_windows(model) as true_patterns:
            probes = probes_of(loaded, max_length)
            _, specs = record_layers(loaded, probes[0].token_ids, true_patterns, mixers)
            backend = first_that_serves(family, backends, specs)
            takes_float32, is_finite = torch.float32 in backend.dtypes, True
            with (
                exact_products(model.device) as multiplies_exactly,
                in_float32(model, by_parts=by_parts)
                if takes_float32
                else nullcontext(False) as is_float32,
            ):
                # Only a check in fp32 can show that logits which looked wrong before are right.
                if refused is not None and refused.__cause__ is None and not is_float32:
                    raise refused
                is_exact = is_float32 and multiplies_exactly
                tolerance = _tolerance(is_float32, multiplies_exactly)
                modules, specs_now = record_layers(
                    loaded, probes[0].token_ids, true_patterns, mixers
                )
                # Without fp32, rounding might hide that a family counts rows: RowStarts come first.
                differences = {}
                for counts_rows in (not is_exact, is_exact):
                    checked = CheckedModel(
                        modules,
                        specs_now,
                        backend,
                        counts_rows,
                        (*mixers,),
                        why_no_own_code=why_no_own_code,
                    )
                    difference = compare(loaded, checked, probes, tolerance)
                    differences[counts_rows] = difference
                    if difference.is_tolerable:
                        break
                if decoders and difference.is_tolerable:
                    by_parts = by_parts and is_float32
                    if loaded.format and not is_float32:  # products may round inputs
                        tolerance = ROUNDING_TOLERANCE
                    checked = _with_decoder(
                        loaded, checked, decoders, max_length, tolerance, by_parts
                    )
            # fp32 hides that activations overflow in fp16, whose numbers end at 65,504.
            if is_float32 and model.dtype == torch.float16:
                is_finite = is_finite_alone(loaded, checked, probes[0])
    except FAILURES as error:
        raise UnsupportedModelError(
            f"{family}: a packed step does not run: {type(error).__name__}: {error}"
        ) from error
    plain = differences.get(False, difference)
    if not (plain.is_finite_alone and is_finite):
        raise UnsupportedModelError(f"{family}: logits are not finite: {why_not_finite(model)}")
    if not difference.is_tolerable:
        raise UnsupportedModelError(
            f"{family}: requests in a packed step do not get the same logits as alone (they are "
            f"off by {plain.median:.2g} of their spread in half of the rows, by {plain.worst:.2g} "
            "in one)"
        )
    if checked.decoder is not None:
        specs = checked.decoder.cache_specs(model, specs)
    true_specs = [replace(spec, pattern=true_patterns[spec.pattern]) for spec in specs]
    return replace(checked, specs=true_specs)


def _with_decoder(
    loaded: LoadedModel,
    checked: CheckedModel,
    decoders: Items[type[Decoder]],
    max_length: int | None,
    tolerance: float,
    by_parts: bool,
) -> CheckedModel:
    """Returns `checked` with the first decoder that passes, or with the reasons why none passes.
    With `by_parts`, weights are in fp32 only while they are in use. So the unpacked decoder is
    compared in place of the decoder."""
    probes = decoder_probes(loaded, max_length)
    reasons = []
    for decoder in decoders:
        try:
            specs = decoder.cache_specs(loaded.model, checked.specs)
            passed = replace(checked, decoder=decoder, specs=specs, why_no_own_code="")
            tried = replace(passed, decoder=decoder.unpacked) if by_parts else passed
            difference = compare(loaded, tried, probes, tolerance)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # also those of Triton's compiler
            reasons.append(str(error).split("\n")[0])
            continue
        if difference.is_tolerable:
            return passed
        reasons.append(f"its logits are off by {difference.median:.2g} of their spread")
    return replace(checked, why_no_own_code="; ".join(reasons))


def _tolerance(is_float32: bool, multiplies_exactly: bool) -> float:
    if not is_float32:
        return LOW_PRECISION_TOLERANCE
    if multiplies_exactly:
        return TOLERANCE
    logger.warning(
        "products in fp32 are rounded to TF32 here, whatever torch requests"
        " (NVIDIA_TF32_OVERRIDE=%s), so the check at load has the tolerance %g instead of %g",
        *(os.environ.get("NVIDIA_TF32_OVERRIDE", ""), TF32_TOLERANCE, TOLERANCE),
    )
    return TF32_TOLERANCE
