"""Reads a GGUF file's header: its fields, except the vocabulary, and the list of its tensors."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

from promptq.shared.errors import ModelNotFoundError
from promptq.worker.engine.checkpoints.library_errors import LOADING_ERRORS, first_sentence

_NAMED_TEMPLATE = "tokenizer.chat_template."
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")


class GGUFHeader:
    """The header of a GGUF file. The file is mapped into memory, so only the parts that are used
    are read."""

    def __init__(self, source: str) -> None:
        """Read the header. Raises ModelNotFoundError if the file cannot be read."""
        try:
            self._reader: Any = _Reader(source)
            self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in self._reader.tensors}
            self.architecture = self.field("general.architecture")
            if not isinstance(self.architecture, str):
                raise ValueError("it does not name its architecture")
            self.num_parts = int(self.field("split.count") or 1)
            self.vocab_size = self._vocab_size()
            self.end_token_ids = frozenset(
                int(token_id)
                for name in _END_TOKENS
                if (token_id := self.field(f"tokenizer.ggml.{name}")) is not None
            )
        except (*LOADING_ERRORS, struct.error) as error:
            raise ModelNotFoundError(
                f"{source}: is not a readable GGUF file, or is incomplete: {first_sentence(error)}"
            ) from error

    @property
    def named_chat_templates(self) -> dict[str, str]:
        """The chat templates in addition to the default one, such as `tool_use`, by name."""
        return {
            name.removeprefix(_NAMED_TEMPLATE): template
            for name in self._reader.fields
            if name.startswith(_NAMED_TEMPLATE) and isinstance(template := self.field(name), str)
        }

    def field(self, name: str) -> Any:
        """Returns a field's value; None if the file lacks the field. Raises ValueError if the value
        is an array."""
        field = self._reader.get_field(name)
        if field is not None and field.types[0] == GGUFValueType.ARRAY:
            raise ValueError(f"its {name} is an array")
        return None if field is None else field.contents()

    def own_field(self, name: str) -> Any:
        """Returns the value of the field `{architecture}.{name}`, such as `llama.block_count`; None
        if the file lacks the field."""
        return self.field(f"{self.architecture}.{name}")

    def _vocab_size(self) -> int:
        """Returns the number of rows of the embedding, or the number of tokens if the file has no
        embedding. For example, the first part of a split file may have no embedding."""
        embedding = self.tensors.get("token_embd.weight")
        if embedding is not None:
            return int(embedding.shape[-1])
        tokens = self._reader.get_field("tokenizer.ggml.tokens")
        if tokens is None:
            raise ValueError("it has neither an embedding nor tokens")
        return int(tokens.parts[-1][0])


class _Reader(GGUFReader):
    """Reads the values of fields, but only the length of an array. The gguf package makes a numpy
    array for each array element, which takes seconds for a vocabulary of 150,000 tokens."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, Any, Any, Any]:
        if raw_type != GGUFValueType.ARRAY:
            parts: tuple[int, Any, Any, Any] = super()._get_field_parts(orig_offs, raw_type)
            return parts
        data: Any = self.data  # the file's bytes
        number, count = struct.unpack_from("<IQ", data, orig_offs)
        kind, end = GGUFValueType(number), orig_offs + 12
        if kind == GGUFValueType.ARRAY:
            raise ValueError("it has an array of arrays")
        if kind == GGUFValueType.STRING:
            for _ in range(count):
                end += 8 + struct.unpack_from("<Q", data, end)[0]
        else:
            end += count * self.gguf_scalar_to_np[kind]().itemsize
        if end > len(data):
            raise ValueError("it ends within an array")
        return end - orig_offs, [np.array([count])], [], [GGUFValueType.ARRAY, kind]
