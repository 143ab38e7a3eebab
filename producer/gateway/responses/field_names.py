"""Fields of a payload that have another name in /v1/responses."""

from __future__ import annotations

NAMES = {
    "messages": "input",
    "prompt": "input",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}
"""By their names in a payload."""


def named_as_asked(message: str, field: str | None) -> tuple[str, str | None]:
    """An error's message, which begins with the name of the field, and that field."""
    name = NAMES.get(field or "")
    if name is None:
        return message, field
    return name + message.removeprefix(field or ""), name
