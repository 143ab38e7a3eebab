"""Tokenizers of kinds that the shipped model's is not of."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast


def byte_fallback() -> PreTrainedTokenizerFast:
    """As of SentencePiece: spaces are U+2581, and what has no token is spelt in bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", '"', "{", "}", ":", ",", "a", "b", '▁"', '{"', '":', "▁{", "cat", "1", "23"]
    model = models.BPE(
        {word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def sentence_piece(*, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """As Llama 2 has it: a space is put in front of each text, and the first one is dropped."""
    tokenizer = byte_fallback()
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return tokenizer
