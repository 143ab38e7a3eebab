"""The files of a model whose token ids are bytes, as a worker reads them beside the stand-in."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
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


def save_byte_gguf(file: Path) -> Path:
    """The same in a GGUF file. It cannot be without a merge, so it has one of two bytes that no
    text has."""
    characters = _characters()
    tokens = [*(characters[byte] for byte in range(256)), END, characters[255] * 2]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 1])
    writer.add_token_merges([f"{characters[255]} {characters[255]}"])
    writer.add_eos_token_id(256)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _characters() -> dict[int, str]:
    """The character that stands for each byte: itself if it can be printed, or one after 255."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {
        byte: chr(byte) if byte in printable else chr(256 + others.index(byte))
        for byte in range(256)
    }
