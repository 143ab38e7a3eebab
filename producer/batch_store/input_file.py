"""Reads the lines of a batch's input file piece by piece, and checks each line.

A line is `{"custom_id": ..., "method": "POST", "url": "/v1/...", "body": {...}}`, as at OpenAI.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from promptq.shared.errors import PromptqError
from promptq.shared.protocol.request import MAX_PAYLOAD_BYTES
from promptq.shared.queue.request_queue import new_request_id

MAX_LINES = 50_000
MAX_BLANK_LINES = 50_000
MAX_FILE_BYTES = 200 * 1024 * 1024
MAX_LINE_BYTES = MAX_PAYLOAD_BYTES
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
_PREFIXES = dict(zip(URLS, ("chatcmpl-", "cmpl-", "embd-"), strict=True))
_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
_BLOCK_BYTES = 1 << 20
_MAX_CUSTOM_ID = 512
_CUSTOM_ID = re.compile(rf"[^\ud800-\udfff]{{1,{_MAX_CUSTOM_ID}}}", re.DOTALL)
"""Pattern of a custom id. It excludes surrogates, which cannot be written to a file."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch. `number` is the line's number, from 1; blank lines count too."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


def new_batch_id() -> str:
    """Returns an id that sorts after the ids of earlier batches."""
    return "batch_" + new_request_id().replace("-", "")


def is_batch_id(text: str) -> bool:
    """Returns whether a text has the form of a batch's id."""
    return _BATCH_ID.fullmatch(text) is not None


def request_id_of(batch_id: str, line: BatchLine) -> str:
    """Returns the id of a line's request in the queue. Every process computes the same id.

    The id is a UUIDv7 with the batch's time, and a hash of batch and line as random bits.
    """
    time_and_version = uuid.UUID(batch_id.removeprefix("batch_")).int >> 76
    digest = hashlib.sha256(f"{batch_id} {line.number}".encode()).digest()
    low = int.from_bytes(digest[:10]) & (2**76 - 1)
    low = low & ~(0b11 << 62) | 0b10 << 62
    return _PREFIXES[line.url] + str(uuid.UUID(int=time_and_version << 76 | low))


class BatchFileError(PromptqError):
    """No line of an input file can run. `code` names the problem, such as `empty_file`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class BrokenLineError(PromptqError):
    """A line that is not a valid request. `custom_id` is None if the line has no readable one."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


class RefusedLineError(PromptqError):
    """A line that the gateway would answer with an HTTP error. `body` is this answer's body."""

    def __init__(self, line: BatchLine, request_id: str, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"line {line.number} is refused with {status}")
        self.line = line
        self.request_id = request_id
        self.status = status
        self.body = body


def lines_at(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yields each line that is not blank: its number (counted from 1, with blank lines), its offset
    in bytes, and its bytes.

    A line of more than MAX_LINE_BYTES is cut to MAX_LINE_BYTES + 1 bytes. So the caller can
    recognise and report the line.
    """
    with path.open("rb") as file:
        number = offset = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if raw.strip():
                yield number, offset, raw
            offset += len(raw)
            rest = raw
            while _goes_on(rest):
                rest = file.readline(MAX_LINE_BYTES + 1)
                offset += len(rest)


def _goes_on(piece: bytes) -> bool:
    return len(piece) > MAX_LINE_BYTES and not piece.endswith(b"\n")


def count_lines(path: Path) -> int:
    """Returns the number of a file's lines that are not blank.

    Raises BatchFileError if the file is larger than 200 MiB, does not begin in UTF-8, or has only
    blank lines. Also raises BatchFileError for over 50,000 lines that are not blank, and for over
    100,000 lines in all.
    """
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise BatchFileError(
            "file_too_large", f"the file has {size} bytes, more than the {MAX_FILE_BYTES} allowed"
        )
    count = 0
    with path.open("rb") as file:
        # By blocks: a file may be line breaks alone, and each line would cost a call.
        while block := file.read(_BLOCK_BYTES):
            encoding = json.detect_encoding(block)
            if file.tell() == len(block) and not encoding.startswith("utf-8"):
                message = f"the file is {encoding}; its lines must be JSON in utf-8"
                raise BatchFileError("not_utf8", message)
            count += block.count(b"\n")
            if count > MAX_LINES + MAX_BLANK_LINES:
                raise BatchFileError(
                    "too_many_lines",
                    f"the file has more than the {MAX_LINES} lines and {MAX_BLANK_LINES} blank ones"
                    " allowed",
                )
    count = 0
    for _ in lines_at(path):
        count += 1
        if count > MAX_LINES:
            raise BatchFileError(
                "too_many_lines", f"the file has more than the {MAX_LINES} lines allowed"
            )
    if count == 0:
        raise BatchFileError("empty_file", "the file has no lines")
    return count


class LineReader:
    """Parses the lines of a batch's input file as requests. Each custom id may appear only once.

    With an `endpoint`, only lines for this URL are allowed.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = endpoint
        self._custom_ids: set[str] = set()

    def parse(self, number: int, raw: bytes) -> BatchLine:
        """Parses line `number`, whose bytes are `raw`. Raises BrokenLineError."""
        if _goes_on(raw):
            raise BrokenLineError(
                "line_too_long", f"line {number} has more than the {MAX_LINE_BYTES} bytes allowed"
            )
        try:
            line = json.loads(raw.decode("utf-8-sig").strip())
        except UnicodeDecodeError as error:
            reason = f"is not UTF-8 from byte {error.start} on"
            raise BrokenLineError("invalid_json_line", f"line {number} {reason}") from None
        except json.JSONDecodeError as error:
            reason = f"is not JSON: {error.msg} at character {error.pos}"
            raise BrokenLineError("invalid_json_line", f"line {number} {reason}") from None
        except (ValueError, RecursionError):
            reason = "is JSON that is nested too deeply, or has too large a number"
            raise BrokenLineError("invalid_json_line", f"line {number} {reason}") from None
        if not isinstance(line, dict):
            raise BrokenLineError("invalid_json_line", f"line {number} is not a JSON object")
        custom_id = self._custom_id(number, line.get("custom_id"))
        method, url, body = line.get("method", "POST"), line.get("url"), line.get("body")
        if method != "POST":
            raise BrokenLineError("invalid_method", f"method: {method!r} is not 'POST'", custom_id)
        if url not in URLS or self._endpoint not in (None, url):
            wanted = self._endpoint or " or ".join(URLS)
            raise BrokenLineError("invalid_url", f"url: {url!r} is not {wanted}", custom_id)
        if not isinstance(body, dict):
            raise BrokenLineError("invalid_body", "body: is not a JSON object", custom_id)
        return BatchLine(number, custom_id, url, body)

    def _custom_id(self, number: int, custom_id: object) -> str:
        if not isinstance(custom_id, str) or not _CUSTOM_ID.fullmatch(custom_id):
            raise BrokenLineError(
                "missing_custom_id",
                f"line {number} has no custom_id, a text of 1 to {_MAX_CUSTOM_ID} characters",
            )
        if custom_id in self._custom_ids:
            raise BrokenLineError(
                "duplicate_custom_id",
                f"line {number} has the custom_id of another line",
                custom_id,
            )
        self._custom_ids.add(custom_id)
        return custom_id
