"""What a GGUF file says of itself: its fields, without the vocabulary, and its tensors."""

from __future__ import annotations

import struct
from typing import Any

from gguf import GGUFReader, GGUFValueType

from promptq.shared.errors import ModelNotFoundError
from promptq.worker.engine.checkpoints.library_errors import LOADING_ERRORS, first_sentence

_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")


class GGUFHeader:
    """The file is mapped. Its tensors are read where they are needed."""

    def __init__(self, source: str) -> None:
        """Raises ModelNotFoundError if the file cannot be read."""
        try:
            self._reader: Any = _Reader(source)
            self.architecture = str(self.field("general.architecture"))
            self.num_parts = int(self.field("split.count") or 1)
            self.end_token_ids = frozenset(
                int(token_id)
                for name in _END_TOKENS
                if (token_id := self.field(f"tokenizer.ggml.{name}")) is not None
            )
        except (*LOADING_ERRORS, struct.error) as error:
            raise ModelNotFoundError(
                f"{source}: is no GGUF file that can be read: {first_sentence(error)}"
            ) from error
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in self._reader.tensors}

    def field(self, name: str) -> Any:
        """A value that is no array; None if there is none."""
        field = self._reader.get_field(name)
        return None if field is None else field.contents()

    def own_field(self, name: str) -> Any:
        """The same for a field of the architecture."""
        return self.field(f"{self.architecture}.{name}")

    @property
    def vocab_size(self) -> int | None:
        """The rows of the embedding; None if the file has none."""
        embedding = self.tensors.get("token_embd.weight")
        return None if embedding is None else int(embedding.shape[-1])


class _Reader(GGUFReader):
    """Reads all but the elements of arrays, which are the parts of vocabularies.

    The package makes numpy arrays of each element, which takes seconds for 150,000 tokens. So does
    transformers when it reads a configuration.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, Any, Any, Any]:
        if raw_type != GGUFValueType.ARRAY:
            parts: tuple[int, Any, Any, Any] = super()._get_field_parts(orig_offs, raw_type)
            return parts
        data: Any = self.data  # the file's bytes
        kind, count = struct.unpack_from("<IQ", data, orig_offs)
        end = orig_offs + 12
        if kind == GGUFValueType.STRING:
            for _ in range(count):
                end += 8 + struct.unpack_from("<Q", data, end)[0]
        else:
            end += count * self.gguf_scalar_to_np[GGUFValueType(kind)]().itemsize
        return end - orig_offs, [], [], [GGUFValueType.ARRAY, GGUFValueType(kind)]
