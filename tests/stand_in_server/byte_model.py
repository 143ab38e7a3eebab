"""The files of a model whose token ids are bytes, as a worker reads them beside the stand-in."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<end>"


def save_byte_model(directory: Path) -> Path:
    """Configuration and tokenizer, without weights. The end token is 256."""
    vocabulary = {character: byte for byte, character in _characters().items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    whole.save_pretrained(directory)
    config = {"model_type": "llama", "vocab_size": 257, "eos_token_id": 256, "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _characters() -> dict[int, str]:
    """The character that stands for each byte: itself if it can be printed, or one after 255."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {
        byte: chr(byte) if byte in printable else chr(256 + others.index(byte))
        for byte in range(256)
    }
