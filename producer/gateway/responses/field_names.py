"""Fields of a payload that have another name in /v1/responses."""

from __future__ import annotations

NAMES = {
    "messages": "input",
    "prompt": "input",
    "response_format": "text.format",
    ".json_schema.schema": ".schema",
    ".function.parameters": ".parameters",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}
"""Keys are names in a payload. Names with a dot are inside of fields."""
