"""Random models of the measured size, and steps for them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.attention.kv_cache import KVCache
from promptq.worker.engine.attention.packed_step import PackedStep, Packer
from promptq.worker.engine.attention.step_buffers import StepKind
from promptq.worker.engine.attention.triton_kernels.paged import TritonPaged
from promptq.worker.engine.core.block_manager import num_blocks_for
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence
from promptq.worker.engine.decoders.kernels.fused import FusedDecoder
from promptq.worker.engine.load_check.checked_model import CheckedModel
from promptq.worker.engine.load_check.formula import check_model
from promptq.worker.engine.model.loading import LoadedModel
from promptq.worker.engine.quantization.modules import QuantizedLinear
from promptq.worker.engine.runner.compiled import CompiledModel
from promptq.worker.engine.runner.cuda_graphs import GraphedModel, Model, Results

BLOCK_SIZE = 16
SEED = 5


class PaddedModel(GraphedModel):
    """Runs steps that are padded to one size, on fixed buffers. On a GPU, each kind of step is a
    graph."""

    def _prepare(self, kinds: list[StepKind]) -> None:
        if torch.cuda.is_available():
            super()._prepare(kinds)
            return
        for kind in kinds:
            self._runs[kind] = partial(self._run_plain, self._buffers.step(kind))

    def _run_plain(self, step: PackedStep) -> Results:
        return self.plain.logits(step, step.sampled), None


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a model of Qwen3's shape, and of its workloads. Lengths are in tokens."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int
    batch: int
    context: int
    prompts: int
    prompt: int
    requests: int
    request_prompt: int
    request_output: int
    batches: tuple[int, ...]
    """Sizes of further batches of decodes, with the same length."""
    long_context: int
    """The length of one long sequence among `batch`."""
    guest: int
    """The length of a prompt that is computed beside `batch` decodes."""

    @property
    def products(self) -> list[tuple[int, int]]:
        """The (inputs, outputs) of each matrix product of a layer: QKV, output, gate and up,
        down."""
        query, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        return [
            (self.hidden, query + 2 * kv),
            (query, self.hidden),
            (self.hidden, 2 * self.intermediate),
            (self.intermediate, self.hidden),
        ]

    @property
    def max_length(self) -> int:
        return max(self.long_context, self.guest) + 96

    @property
    def decodes(self) -> dict[str, list[int]]:
        """The contexts of the measured decode steps, in tokens for each sequence, by the name of
        the step."""
        steps = {
            f"{batch} of length {self.context}": [self.context] * batch
            for batch in (self.batch, *self.batches)
        }
        others = self.batch - 1
        name = f"one of length {self.long_context} among {others} of {self.context}"
        return {**steps, name: [self.long_context, *[self.context] * others]}


LARGE = Size(
    *(4096, 36, 32, 8, 128, 12288, 151_936),
    *(64, 1000, 4, 2048, 128, 512, 256),
    batches=(1, 256),
    long_context=32_000,
    guest=4000,
)
TINY = Size(
    *(64, 1, 4, 2, 16, 96, 200),
    *(2, 24, 2, 9, 4, 12, 6),
    batches=(1,),
    long_context=40,
    guest=30,
)


def build(size: Size, device: torch.device) -> LoadedModel:
    """Builds a random model on the device, in bf16."""
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_size,
        intermediate_size=size.intermediate,
        vocab_size=size.vocab,
        max_position_embeddings=size.max_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with warnings.catch_warnings(), torch.device(device):
        warnings.simplefilter("ignore")
        torch.manual_seed(SEED)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    module: torch.nn.Module = model
    module.requires_grad_(False).eval()
    return LoadedModel("random", model, frozenset())


def weight_bytes(model: PreTrainedModel) -> int:
    """Returns the bytes of the weights that each step reads: all except the input embedding,
    because a step reads only a few of its rows."""
    read = [*model.parameters()]
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            read += module.quantized.tensors
    embedding = model.get_input_embeddings().weight
    return sum(each.nbytes for each in read) - embedding.nbytes


class Bench:
    """A model on a cache of random numbers, and sequences for steps."""

    def __init__(
        self,
        loaded: LoadedModel,
        size: Size,
        device: torch.device,
        checked: CheckedModel | None = None,
    ) -> None:
        self.loaded, self.size, self.device = loaded, size, device
        # In the interpreter its kernels would take most of a trial's time, and tests run them.
        decoders = [FusedDecoder] if device.type == "cuda" else []
        self.checked = checked or check_model(
            loaded, [TritonPaged()], size.max_length, decoders=decoders
        )
        steps = [*size.decodes.values(), [size.prompt] * size.prompts]
        blocks = max(sum(num_blocks_for(it, BLOCK_SIZE) for it in contexts) for contexts in steps)
        self.cache = KVCache(
            self.checked.specs, num_blocks=blocks, block_size=BLOCK_SIZE, device=device
        )
        for layer in self.cache.layers:
            for each in (layer.key, layer.value):
                each.copy_(torch.randn(each.shape, dtype=torch.bfloat16, device=device))
        self.model = self.checked.on(loaded.model, self.cache, size.max_length)
        self._packer = Packer(BLOCK_SIZE, device)

    @contextmanager
    def layers(self, *, compiled: bool) -> Iterator[Model]:
        """Context with the model as it is served. With `compiled`, the context has the library's
        modules, compiled, instead. Raises RuntimeError if the modules cannot be compiled."""
        if not compiled:
            yield self.model
            return
        of_the_library = replace(self.checked, decoder=None)
        modules = of_the_library.on(self.loaded.model, self.cache, self.size.max_length)
        model = CompiledModel(modules, self.cache, self.size.max_length)
        try:
            if not model.is_compiled:
                raise RuntimeError("the layers cannot be compiled here")
            yield model
            if not model.is_compiled:
                raise RuntimeError("the layers were measured uncompiled")
        finally:
            model.undo()

    def graphed(self, model: Model, batch: int) -> PaddedModel:
        """Returns the model with a padded step of `batch` sequences, which is a graph on a GPU."""
        return PaddedModel(
            model,
            [StepKind(batch)],
            max_num_seqs=batch,
            max_model_len=self.size.max_length,
            block_size=BLOCK_SIZE,
            device=self.device,
        )

    def step(self, contexts: list[int], num_tokens: int) -> PackedStep:
        """Returns a step of the last `num_tokens` tokens of sequences with these lengths. The
        sequences' blocks are scattered over the cache."""
        generator = torch.Generator().manual_seed(SEED)
        blocks = torch.randperm(self.cache.num_blocks, generator=generator).tolist()
        shares = []
        for index, context in enumerate(contexts):
            ids = torch.randint(self.size.vocab, (context,), generator=generator).tolist()
            request = EngineRequest(index, ids, SamplingParams(), seed=0, max_tokens=1)
            sequence = Sequence.of(request)
            sequence.slot = index
            sequence.block_table = [
                blocks.pop() for _ in range(num_blocks_for(context, BLOCK_SIZE))
            ]
            shares.append(
                ScheduledSequence(sequence, context - num_tokens, num_tokens, samples=True)
            )
        return self._packer.pack(Batch(shares))
