"""What functions of transformers raise when files are not as they should be."""

from __future__ import annotations

from safetensors import SafetensorError

LOADING_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ImportError,
    RuntimeError,
    SafetensorError,
)


def first_sentence(error: Exception) -> str:
    """The first sentence of the library's message. The others give advice."""
    text = " ".join(str(error).split("\n")[0].split()) or type(error).__name__
    return text.split(". ")[0].rstrip(".")
