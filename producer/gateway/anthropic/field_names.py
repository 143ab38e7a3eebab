"""Fields of a payload that have another name in /v1/messages."""

from __future__ import annotations

NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    ".json_schema.schema": ".schema",
    ".function.parameters": ".input_schema",
    "output_prefix": "messages",
}
"""Keys are names in a payload. An output's prefix is the last message, if it is the assistant's.
Names with a dot are inside of fields."""
