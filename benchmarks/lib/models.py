"""The benchmarks' models: random weights in bf16, made once and kept in a cache."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from string import ascii_lowercase
from typing import Any, cast

VOCAB_SIZE = 32_000
END_OF_TEXT = "<|endoftext|>"
_SEED = 20_240
_MAX_MODEL_LEN = 8192

CACHE = Path(__file__).parents[1] / ".cache"
"""Where models are kept between runs."""


@dataclass(frozen=True)
class Shape:
    """A model to measure: its family in transformers, its sizes, and the size of its batch."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    batch: int
    kv_cache_bytes: int
    """Memory for the KV cache of each row."""
    family: str = "qwen3"
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further sizes of the family's configuration."""

    def config(self, vocab_size: int = VOCAB_SIZE) -> Any:
        """Returns transformers' configuration of the model. Input and output embedding are tied."""
        from transformers import AutoConfig

        return cast(Any, AutoConfig).for_model(
            self.family,
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            max_position_embeddings=_MAX_MODEL_LEN,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
            dtype="bfloat16",
            **self.more,
        )

    @cached_property
    def num_parameters(self) -> int:
        """Number of all parameters, with all experts: a full batch uses nearly all of them."""
        import torch

        with torch.device("meta"):
            return sum(weight.numel() for weight in _untrained(self.config()).parameters())

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that one token uses."""
        experts = self.more.get("num_experts", 0)
        idle = experts and experts - self.more["num_experts_per_tok"]
        return self.num_parameters - idle * self.layers * 3 * self.hidden * self.expert_size

    @property
    def expert_size(self) -> int:
        """Width of an expert's MLP; 0 without experts."""
        return int(self.more.get("moe_intermediate_size", 0))

    @property
    def weight_bytes(self) -> int:
        return 2 * self.num_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values in all layers with attention, ignoring windows."""
        kinds = getattr(self.config(), "layer_types", None) or ["attention"] * self.layers
        layers = sum("linear" not in kind for kind in kinds)
        return layers * self.kv_heads * self.head_dim * 2 * 2


_GIB = 2**30
_SHAPES = (
    Shape("54m", 512, 12, 8, 4, 64, 1536, batch=64, kv_cache_bytes=_GIB // 2),
    Shape("473m", 1024, 28, 16, 8, 128, 3072, batch=32, kv_cache_bytes=3 * _GIB),
    Shape(
        *("experts-704m", 1024, 16, 16, 16, 64, 3072),
        batch=32,
        kv_cache_bytes=_GIB,
        family="qwen3_moe",
        more={
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 384,
            "norm_topk_prob": True,
        },
    ),
    Shape(
        *("gemma3-473m", 1024, 28, 16, 8, 128, 3072),
        batch=32,
        kv_cache_bytes=3 * _GIB,
        family="gemma3_text",
        more={"sliding_window": 512, "query_pre_attn_scalar": 128},
    ),
    Shape(
        *("qwen3.5-500m", 1024, 24, 8, 2, 256, 3072),
        batch=32,
        kv_cache_bytes=3 * _GIB,
        family="qwen3_5_text",
        more={"linear_num_key_heads": 16, "linear_num_value_heads": 16},
    ),
)
MODELS = {shape.name: shape for shape in _SHAPES}


def model_dir(shape: Shape, cache: Path) -> Path:
    """Returns the model's directory, and makes the model if it is not there."""
    folder = cache / f"{shape.family}-{shape.name}"
    if not folder.exists():
        unfinished = cache / f".{folder.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        _make(shape, unfinished)
        unfinished.rename(folder)
    return folder


def _make(shape: Shape, folder: Path) -> None:
    random_model(shape, VOCAB_SIZE, _SEED).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def random_model(shape: Shape, vocab_size: int, seed: int) -> Any:
    """Returns a causal model of this shape with random weights in bf16."""
    import torch

    torch.manual_seed(seed)
    return _untrained(shape.config(vocab_size)).to(torch.bfloat16)


def _untrained(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return cast(Any, AutoModelForCausalLM).from_config(config)


def vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Returns tokens by id, and the merges that make them: bytes, then words of two and three
    letters.

    The vocabulary is untrained, but in a form that peers can read. Its tokens are letters and
    spaces.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    pairs = [(a, b) for a in ascii_lowercase for b in ascii_lowercase]
    triples = [(a + b, c) for a, b in pairs for c in ascii_lowercase]
    spaced = [("Ġ", a + b + c) for a, b in pairs for c in ascii_lowercase]
    room = VOCAB_SIZE - len(alphabet) - 1
    merges = list(islice([*pairs, *triples, *spaced], room))
    return [END_OF_TEXT, *alphabet, *(left + right for left, right in merges)], merges


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    tokens, merges = vocabulary()
    bpe = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return cast(Any, PreTrainedTokenizerFast)(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=_MAX_MODEL_LEN,
    )
