"""Exceptions that transformers raises for faulty files."""

from __future__ import annotations

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

LOADING_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    ArithmeticError,
    AssertionError,
    MemoryError,
    TypeError,
    AttributeError,
    ImportError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)


def first_sentence(error: Exception) -> str:
    """Returns the first sentence of transformers' message, without the advice that follows."""
    if isinstance(error, ZeroDivisionError | RecursionError | AssertionError | MemoryError):
        kind = type(error).__name__
        return f"its files have impossible sizes, or sizes that do not match ({kind})"
    if isinstance(error, KeyError):
        return f"{error} is missing in its files"
    first, _, rest = str(error).strip().partition("\n")
    if first.rstrip().endswith(":"):  # only the next line names the fault
        first += " " + rest.strip().split("\n")[0]
    text = " ".join(first.split()) or type(error).__name__
    return text.split(". ")[0].rstrip(".")
