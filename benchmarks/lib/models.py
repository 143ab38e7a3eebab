"""The benchmarks' models: Qwen3-shaped, random weights in bf16, made once and kept in a cache."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model, and the batch that it is measured at."""

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

    @property
    def num_parameters(self) -> int:
        """With input and output embedding tied."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        norms = 2 * self.hidden + 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate + norms
        return VOCAB_SIZE * self.hidden + self.layers * layer + self.hidden

    @property
    def weight_bytes(self) -> int:
        return 2 * self.num_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * self.kv_heads * self.head_dim * 2 * 2


MODELS = {
    "54m": Shape("54m", 512, 12, 8, 4, 64, 1536, batch=64, kv_cache_bytes=2**29),
    "473m": Shape("473m", 1024, 28, 16, 8, 128, 3072, batch=32, kv_cache_bytes=3 * 2**30),
}


def model_dir(shape: Shape, cache: Path) -> Path:
    """The model's directory, made if it is not there."""
    folder = cache / f"qwen3-{shape.name}"
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
    """A Qwen3ForCausalLM of this shape with random weights in bf16."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        max_position_embeddings=_MAX_MODEL_LEN,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        dtype="bfloat16",
    )
    return cast(Any, Qwen3ForCausalLM(config)).to(torch.bfloat16)


def vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens by id, and the merges that make them: bytes, then words of two and three letters.

    Untrained, but of the kind that peers know how to read; its texts are letters and spaces.
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
