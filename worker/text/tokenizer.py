"""Tokenizers turn text into token ids and back: for Hugging Face models, and for bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from promptq.shared.errors import InvalidRequestError, ModelNotFoundError, PromptqError
from promptq.shared.protocol.request import Request
from promptq.worker.engine.checkpoints.location import library_arguments
from promptq.worker.engine.checkpoints.safe_files import check_files, check_tokenizer_config
from promptq.worker.text.chat_rendering import MAX_REASON, ChatRenderer
from promptq.worker.text.detokenizer import Decode
from promptq.worker.text.template_time_limit import CpuTimeLimitError

_ANY_LENGTH = 10**30


class Tokenizer(Protocol):
    """Converts between text and token ids. Thread-safe, for the worker's threads."""

    def encode_prompt(self, request: Request) -> list[int]:
        """Returns token ids of the prompt or the rendered messages. Raises InvalidRequestError."""

    def encode_output(self, text: str) -> list[int]:
        """Returns a text's token ids, without adding special tokens. Raises InvalidRequestError."""

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each word, both at the start of a text and after a space, all in
        one list. Raises InvalidRequestError."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text without special tokens. Incomplete characters become U+FFFD."""

    def decoder(self, marks: Sequence[str]) -> Decode:
        """Returns a function like `decode` that keeps the special tokens in `marks`."""

    def added_token(self, text: str) -> int | None:
        """Returns the id of the added token with exactly this text; None if there is none."""

    def special_within(self, text: str) -> list[str]:
        """Returns the special tokens in `text`, such as `<eos>`, which `decode` leaves out."""

    def token_text(self, token_id: int) -> str:
        """Returns a token's text with its leading space. For a special token, returns its name."""


class ByteTokenizer:
    """Uses the bytes of UTF-8 as token ids, for the model-free engine."""

    def encode_prompt(self, request: Request) -> list[int]:
        if isinstance(request.prompt, list):
            return request.prompt
        if request.prompt is not None:
            return list(request.prompt.encode())
        return list("\n".join(str(m.get("content", "")) for m in request.messages or ()).encode())

    def encode_output(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        return [list(word.encode()) for word in words]

    def decode(self, token_ids: Sequence[int]) -> str:
        try:
            text = bytes(token_ids)
        except ValueError:  # an end token is among them
            text = bytes(token for token in token_ids if token < 256)
        return text.decode("utf-8", "replace")

    def decoder(self, marks: Sequence[str]) -> Decode:
        return self.decode

    def added_token(self, text: str) -> int | None:
        return None

    def special_within(self, text: str) -> list[str]:
        return []

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id]) or f"<{token_id}>"


class HuggingFaceTokenizer:
    """The tokenizer that comes with a model.

    Before tokenising, refuses a prompt with more characters than `max_prompt_tokens` tokens can
    have. None means no limit.
    """

    def __init__(self, tokenizer: Any, max_prompt_tokens: int | None = None) -> None:
        self._tokenizer = tokenizer
        tokenizer.model_max_length = _ANY_LENGTH  # avoids warnings about long prompts
        self._max_prompt_tokens = max_prompt_tokens
        self._max_prompt_chars: int | None = None
        if max_prompt_tokens is not None:  # a token's name has no fewer characters than the token
            longest = max(map(len, tokenizer.get_vocab()), default=1)
            self._max_prompt_chars = max_prompt_tokens * longest
        self.chats = ChatRenderer(tokenizer)
        self.decode = self._decoder(None)
        self._decoders: dict[frozenset[str], Decode] = {frozenset(): self.decode}
        self._token_texts: dict[int, str] = {}

    @classmethod
    def load(
        cls,
        name_or_dir: str,
        *,
        trust_remote_code: bool = False,
        max_prompt_tokens: int | None = None,
    ) -> HuggingFaceTokenizer:
        """Returns a model's tokenizer. Raises ModelNotFoundError if the model has no usable one."""
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
        from transformers.models.auto.tokenization_auto import get_tokenizer_config

        place, arguments = library_arguments(name_or_dir)
        if Path(place).is_dir():
            check_files(Path(place))
        of_gguf: Any = PreTrainedTokenizerFast
        loaded: Any
        try:
            if arguments:
                from promptq.worker.engine.checkpoints.gguf.header import GGUFHeader

                # AutoTokenizer would first read the configuration, which takes long with a GGUF
                # file, and would load another tokenizer of the same folder.
                loaded = of_gguf(
                    name_or_path=place,
                    local_files_only=True,
                    bos_token=None,  # otherwise transformers adds default tokens
                    eos_token=None,
                    **arguments,
                )
                if named := GGUFHeader(arguments["gguf_file"]).named_chat_templates:
                    default = loaded.chat_template
                    loaded.chat_template = {**({"default": default} if default else {}), **named}
            else:
                check_tokenizer_config(place, get_tokenizer_config(place))
                loaded = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
            return cls(loaded, max_prompt_tokens)
        except BaseException as error:  # the tokenizers library raises plain Exceptions, and panics
            if isinstance(error, PromptqError | KeyboardInterrupt | SystemExit):
                raise
            reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
            raise ModelNotFoundError(f"{name_or_dir} has no usable tokenizer: {reason}") from error

    def encode_prompt(self, request: Request) -> list[int]:
        if isinstance(request.prompt, list):
            return request.prompt
        is_chat = request.prompt is None
        field, text = ("messages" if is_chat else "prompt"), request.prompt or ""
        if is_chat:
            text = self.chats.render(request)
        self._check_length(field, text)
        with _failing_alone(field):  # a chat template writes the special tokens itself
            token_ids = self.encode_text(text, add_special_tokens=not is_chat)
        if request.pictures:
            self._check_places(request, token_ids)
        return token_ids

    def _check_places(self, request: Request, prompt: Sequence[int]) -> None:
        """Raise InvalidRequestError unless the prompt has exactly one place for each picture. If a
        message's text contained a place, the server would put a picture there."""
        mark = self.encode_text(self.chats.mark_of_picture(request))
        special = {*mark} & {*self.added_tokens.values()}
        if not special:
            why = "the model's chat template has no place for pictures"
        elif any(
            prompt.count(each) != len(request.pictures) * mark.count(each) for each in special
        ):
            why = f"the chat must have {len(request.pictures)} places for pictures, and no text may"
            why += f" contain a part of the mark {self._tokenizer.decode(mark)[:MAX_REASON]!r}"
        else:
            return
        raise InvalidRequestError(f"messages: {why}", field="messages")

    def encode_output(self, text: str) -> list[int]:
        self._check_length("output_prefix", text)
        with _failing_alone("output_prefix"):
            token_ids = self.encode_text(text)
            if not self._adds_space:
                return token_ids
            # Tokenise the text after a line break, where the tokenizer adds no space.
            lead = self.encode_text("\n")
            behind = self.encode_text("\n" + text)
            return behind[len(lead) :] if behind[: len(lead)] == lead else token_ids

    @cached_property
    def _adds_space(self) -> bool:
        """Whether the tokenizer adds a space in front of each text, like SentencePiece."""
        return self.decode(self.encode_text("a") * 2) != "aa"

    def _check_length(self, field: str, text: str) -> None:
        if self._max_prompt_chars is not None and len(text) > self._max_prompt_chars:
            what = "it" if field == "output_prefix" else "the prompt"
            raise InvalidRequestError(
                f"{field}: {what} is too long: this model's maximum context length is"
                f" {self._max_prompt_tokens} tokens,"
                f" which have at most {self._max_prompt_chars} characters; this has {len(text)}",
                field=field,
                code="context_length_exceeded",
            )

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        # Most vocabularies have a word twice, alone and with a space in front.
        forms = [form for word in words for form in (word, " " + word)]
        if not forms:
            return []
        with _failing_alone("bad_words"):
            spellings = self._tokenizer(forms, add_special_tokens=False)["input_ids"]
        return [tokens for tokens in spellings if tokens]

    def decoder(self, marks: Sequence[str]) -> Decode:
        kept = frozenset(
            token for token in self.special_tokens if any(token in mark for mark in marks)
        )
        if kept not in self._decoders:
            dropped = {
                token_id for token, token_id in self.special_tokens.items() if token not in kept
            }
            self._decoders[kept] = self._decoder(dropped)
        return self._decoders[kept]

    def added_token(self, text: str) -> int | None:
        return self.added_tokens.get(text)

    def special_within(self, text: str) -> list[str]:
        token_ids = set(self.encode_text(text))  # faster than a search for each name
        names = self.special_tokens.items()
        return [name for name, token_id in names if token_id in token_ids and name in text]

    def token_text(self, token_id: int) -> str:
        text = self._token_texts.get(token_id)
        if text is None:
            # Many tokenizers drop the space in front of the first token, so decode the second one.
            alone = self.decode([token_id])
            text = self.decode([token_id, token_id])[len(alone) :]
            if not text and token_id < self._num_ids:
                text = str(self._tokenizer.convert_ids_to_tokens(token_id) or "")
            self._token_texts[token_id] = text
        return text

    @cached_property
    def _num_ids(self) -> int:
        """The largest token id plus 1. A model's padded vocabulary may have more ids."""
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids of the special tokens by their text. `decode` leaves these tokens out."""
        added = self._tokenizer.added_tokens_decoder
        return {str(token): token_id for token_id, token in added.items() if token.special}

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """The ids of all added tokens by their text, except tokens that are only white space."""
        added = self._tokenizer.added_tokens_decoder.items()
        return {str(token): token_id for token_id, token in added if not str(token).isspace()}

    @property
    def end_token_id(self) -> int | None:
        """The end token's id; None if the vocabulary has no end token."""
        name = self._tokenizer.eos_token
        return None if name is None else self._tokenizer.get_vocab().get(str(name))

    @property
    def num_tokens(self) -> int:
        """Number of tokens, with added tokens. A model's vocabulary may be larger, but is rarely
        smaller."""
        return len(self._tokenizer)

    def as_json(self) -> str | None:
        """Returns the content of a tokenizer.json with the added tokens; None for a tokenizer that
        is not of the tokenizers library."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if backend is None else str(backend.to_str())

    def encode_text(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Returns the token ids of a text of any length."""
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return token_ids

    def _decoder(self, dropped: Collection[int] | None) -> Decode:
        """Returns a decoder that leaves out the tokens `dropped`. None means all special tokens."""
        tokenizer, drops_special = self._tokenizer, dropped is None
        backend = getattr(tokenizer, "backend_tokenizer", None)

        def decode(token_ids: Sequence[int]) -> str:
            if dropped is not None:
                token_ids = [token_id for token_id in token_ids if token_id not in dropped]
            if backend is not None:  # at a fraction of the tokenizer's cost
                text: str = backend.decode(token_ids, skip_special_tokens=drops_special)
            else:
                text = tokenizer.decode(
                    [token_id for token_id in token_ids if token_id < self._num_ids],
                    skip_special_tokens=drops_special,
                    clean_up_tokenization_spaces=False,
                )
            return text

        return decode


@contextmanager
def _failing_alone(field: str) -> Iterator[None]:
    """Inside this context, turn a failure of the tokenizer into InvalidRequestError. Some
    tokenizers have regular expressions that fail with some texts. If an expression takes too long,
    the tokenizers library panics, and a panic is not an Exception."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, CpuTimeLimitError | KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise InvalidRequestError(
            f"{field}: the model's tokenizer fails at this text: {str(error)[:MAX_REASON]}",
            field=field,
        ) from error
