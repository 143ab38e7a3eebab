"""The sampler on the meta device, where tensors have no values: any look at one raises."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("triton")

from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.core.sequence import Sequence
from promptq.worker.engine.sampling import (
    constraints,
    filters,
    logprobs,
    mask_thread,
    penalties,
    sampler,
    temperature_and_choice,
    triton_choice,
)
from promptq.worker.engine.sampling.sampler import Sampler
from promptq.worker.engine.sampling.temperature_and_choice import TorchKernels

META = torch.device("meta")
VOCAB_SIZE = 1000
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.05},
    {"repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    {"logit_bias": {"5": 1.0}},
    {"min_tokens": 3},
    {"logprobs": 2},
]


@pytest.fixture(autouse=True)
def copying_by_to_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other copies from the host are of memory that is not pinned, and wait."""

    def to_meta(values: npt.NDArray[Any] | Items[int], device: torch.device) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values)).to(dtype=None, device=device, copy=True)

    plain_tensor, plain_to = torch.tensor, torch.Tensor.to

    def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        assert torch.device(kwargs.get("device", "cpu")) != META, "a copy from pageable memory"
        return plain_tensor(*args, **kwargs)

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        moves = self.device != META and META in (*args, kwargs.get("device"))
        assert not moves or kwargs.get("copy"), "a copy from pageable memory"
        return plain_to(self, *args, **kwargs)

    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(torch.Tensor, "to", to)
    for module in (
        constraints,
        filters,
        temperature_and_choice,
        logprobs,
        mask_thread,
        penalties,
        sampler,
    ):
        if hasattr(module, "to_device"):
            monkeypatch.setattr(module, "to_device", to_meta)
    # Triton has no meta device. The kernel leaves what it is given.
    monkeypatch.setattr(triton_choice._draw_kernel, "run", lambda *_, **__: None)


def sequence(sequence_id: int, **fields: Any) -> Sequence:
    request = EngineRequest(
        sequence_id,
        [1, 2, 3],
        SamplingParams(**fields),
        seed=0,
        max_tokens=9,
        end_token_ids=frozenset({7}),
        bad_token_sequences=((4,), (5, 6)) if sequence_id % 2 else (),
    )
    made = Sequence.of(request)
    made.token_ids += [5, 8]
    return made


@pytest.mark.parametrize(
    "fields", [*PARAMETERS, {k: v for it in PARAMETERS for k, v in it.items()}]
)
def test_no_sampling_parameter_looks_at_a_value(fields: dict[str, Any]) -> None:
    sampling = Sampler(VOCAB_SIZE, META)
    sequences = [sequence(1, **fields), sequence(2)]
    for _ in range(2):
        logits = torch.empty(2, VOCAB_SIZE, device=META)
        sampled = sampling.sample(logits, sequences)
        assert sampled.token_ids.device == META
        assert sampled.token_ids.shape == (2,)
        for each in sequences:
            each.token_ids.append(9)


def test_the_sorted_way_of_torch_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampler(VOCAB_SIZE, META)
    monkeypatch.setattr(sampling, "_kernels", TorchKernels(META))
    with pytest.raises((RuntimeError, NotImplementedError)):
        sampling.sample(torch.empty(1, VOCAB_SIZE, device=META), [sequence(2, top_p=0.9)])
