"""The shipped model's tokenizer: byte-level BPE, which represents every UTF-8 text."""

from collections.abc import Iterable
from typing import Any, cast

from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, PAD)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, max_length: int
) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of at most ``vocab_size`` tokens, including the special tokens.

    ``vocab_size`` has to leave room for the 256 bytes. ``max_length`` is the model's length limit,
    in tokens.
    """
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = cast(Any, PreTrainedTokenizerFast)(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[END_OF_TEXT, TURN_START],
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return cast(PreTrainedTokenizerFast, tokenizer)
