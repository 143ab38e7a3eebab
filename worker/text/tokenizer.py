"""Prompts to token ids and back: Hugging Face tokenizers, and bytes where there is no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from promptq.shared.errors import InvalidRequestError, ModelNotFoundError
from promptq.shared.protocol.request import Request


class Tokenizer(Protocol):
    """Thread-safe, as intake encodes while the publisher decodes."""

    def encode_prompt(self, request: Request) -> list[int]:
        """The request's prompt or rendered messages. Raises InvalidRequestError."""
        ...

    def encode_word(self, word: str) -> list[list[int]]:
        """The ways in which a word may appear in an output."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; incomplete characters as U+FFFD."""
        ...

    def token_text(self, token_id: int) -> str:
        """The text of one token within a text; a special token's name."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as token ids, for the model-free engine."""

    def encode_prompt(self, request: Request) -> list[int]:
        if isinstance(request.prompt, list):
            return request.prompt
        if request.prompt is not None:
            return list(request.prompt.encode())
        return list("\n".join(str(m.get("content", "")) for m in request.messages or ()).encode())

    def encode_word(self, word: str) -> list[list[int]]:
        return [list(word.encode())]

    def decode(self, token_ids: Sequence[int]) -> str:
        try:
            text = bytes(token_ids)
        except ValueError:  # an end token is among them
            text = bytes(token for token in token_ids if token < 256)
        return text.decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id]) or f"<{token_id}>"


class HuggingFaceTokenizer:
    """The tokenizer that comes with a model."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.decode = _decoder(tokenizer)
        self._token_texts: dict[int, str] = {}

    @classmethod
    def load(cls, name_or_dir: str, *, trust_remote_code: bool = False) -> HuggingFaceTokenizer:
        """Raises ModelNotFoundError when there is no tokenizer."""
        from transformers import AutoTokenizer

        try:
            return cls(
                AutoTokenizer.from_pretrained(name_or_dir, trust_remote_code=trust_remote_code)
            )
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().split("\n", 1)[0]
            raise ModelNotFoundError(f"{name_or_dir} has no usable tokenizer: {reason}") from error

    def encode_prompt(self, request: Request) -> list[int]:
        if isinstance(request.prompt, list):
            return request.prompt
        if request.prompt is not None:
            return self._encode(request.prompt, add_special_tokens=True)
        if not self._tokenizer.chat_template:
            raise InvalidRequestError(
                "messages: the model has no chat template; send a prompt", field="messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                request.messages,
                tools=None if request.tool_choice == "none" else request.tools,
                add_generation_prompt=True,
                tokenize=False,
                **(request.chat_template_kwargs or {}),
            )
        except Exception as error:  # the template is the model's code and may raise anything
            raise InvalidRequestError(
                f"messages: the model's chat template refuses them: {error}", field="messages"
            ) from error
        # The template writes the special tokens itself.
        return self._encode(text, add_special_tokens=False)

    def encode_word(self, word: str) -> list[list[int]]:
        # Most vocabularies hold a word twice, alone and with the space in front.
        spellings = [self._encode(form, add_special_tokens=False) for form in (word, " " + word)]
        return [tokens for tokens in spellings if tokens]

    def token_text(self, token_id: int) -> str:
        text = self._token_texts.get(token_id)
        if text is None:
            # Many tokenizers drop the space in front of a text's first token, so it stands twice.
            alone = self.decode([token_id])
            text = self.decode([token_id, token_id])[len(alone) :]
            text = text or str(self._tokenizer.convert_ids_to_tokens(token_id))
            self._token_texts[token_id] = text
        return text

    @property
    def chat_template(self) -> str:
        """Empty if there is none; the default one if there are several."""
        template = self._tokenizer.chat_template or ""
        return str(template.get("default", "") if isinstance(template, dict) else template)

    @property
    def num_tokens(self) -> int:
        """With added tokens; a model's vocabulary may be larger, rarely smaller."""
        return len(self._tokenizer)

    def as_json(self) -> str | None:
        """The content of a tokenizer.json, added tokens included; None for slow tokenizers."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if backend is None else str(backend.to_str())

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return token_ids


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # what `decode` comes down to, at a fraction of its cost

        def decode_fast(token_ids: Sequence[int]) -> str:
            text: str = backend.decode(token_ids, skip_special_tokens=True)
            return text

        return decode_fast

    def decode(token_ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    return decode
