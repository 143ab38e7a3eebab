"""Trace files: the calls that changed a server's queues, in the order in which the server executed
them.

A trace has one JSON object a line. The first line is the header, and the last line counts the
calls. The lines between them are calls of scripts (`script`, `keys`, `args`) and plain commands
(`command`). Each call has the server's time in microseconds (`at`) and the `reply`. A plain command
that was read from an append-only file has no reply. If a call `goes_on`, the next call belongs to
the same transaction. Bytes that are not UTF-8 are lone surrogates.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

import hiredis

from promptq.shared.queue.call import SCRIPT_NAMES, script_text

FORMAT = "promptq trace 1"

UNKNOWN = object()
"""The reply of a command whose reply nobody recorded."""


class TraceError(Exception):
    """Raised if a file is no trace that can be replayed. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One call. A plain command has no `script` and no `keys`, and `args` are all its words."""

    at_us: int
    script: str
    keys: tuple[str, ...]
    args: tuple[str, ...]
    reply: Any = UNKNOWN
    by: str = ""
    """The process that sent the call, if it is known."""
    goes_on: bool = False
    """Whether the next call is of the same transaction."""

    @property
    def name(self) -> str:
        """A sentence that names the call."""
        return (self.script or self.args[0].upper()) + (f" by {self.by}" if self.by else "")

    def to_json(self) -> str:
        fields: dict[str, Any] = {"at": self.at_us}
        if self.by:
            fields["by"] = self.by
        if self.script:
            fields |= {"script": self.script, "keys": self.keys, "args": self.args}
        else:
            fields["command"] = self.args
        if self.reply is not UNKNOWN:
            fields["reply"] = self.reply
        if self.goes_on:
            fields["goes_on"] = True
        return json.dumps(fields)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Entry:
        """Returns the entry that these JSON fields describe. Raises KeyError, TypeError,
        ValueError."""
        script = fields.get("script", "")
        if script and script not in SCRIPT_NAMES:
            raise ValueError(f"there is no script {script!r}")
        at_us = fields["at"]
        keys = fields["keys"] if script else []
        args = fields["args" if script else "command"]
        if type(at_us) is not int or at_us < 0:
            raise ValueError(f"the time {at_us!r} is no number of microseconds")
        if not all(isinstance(word, str) for word in (*keys, *args)) or not (script or args):
            raise ValueError("its words are not texts")
        return cls(
            at_us,
            script,
            tuple(keys),
            tuple(args),
            fields["reply"] if script else fields.get("reply", UNKNOWN),
            str(fields.get("by", "")),
            bool(fields.get("goes_on")),
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace. `source` names the run, and `lease_ms` is the length of all leases in
    milliseconds."""

    source: str
    lease_ms: int
    entries: Sequence[Entry]

    def write(self, path: Path) -> None:
        with path.open("w") as file:
            writer = TraceWriter(file, self.source, self.lease_ms)
            for entry in self.entries:
                writer.write(entry)
            writer.end()


class TraceWriter:
    """Writes a trace to a file. A trace without a call of `end` counts as cut off."""

    def __init__(self, file: TextIO, source: str, lease_ms: int) -> None:
        self._file = file
        self._num_calls = 0
        header = {"format": FORMAT, "source": source, "lease_ms": lease_ms}
        self._line(json.dumps({**header, "scripts": scripts_digest()}))

    def write(self, entry: Entry) -> None:
        self._num_calls += 1
        self._line(entry.to_json())

    def end(self) -> None:
        self._line(json.dumps({"calls": self._num_calls}))

    def _line(self, line: str) -> None:
        self._file.write(line + "\n")


def read_trace(path: Path) -> Trace:
    """Returns the trace in a file. Raises TraceError."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is no trace: it is not text in UTF-8.") from error
    if not lines:
        raise TraceError(f"{path} is no trace: it is empty.")
    header = _object(path, 1, lines[0])
    if header.get("format") != FORMAT:
        raise TraceError(
            f"{path} is no trace: its format is {header.get('format')!r}, not {FORMAT!r}."
        )
    if header.get("scripts") != scripts_digest():
        raise TraceError(
            f"{path} is from another version of the scripts; record it with this version."
        )
    if type(header.get("lease_ms")) is not int:
        raise TraceError(f"{path} is no trace: its header has no lease_ms.")
    try:
        end = json.loads(lines[-1])
    except ValueError:
        end = None
    if not isinstance(end, dict) or "calls" not in end:
        raise TraceError(f"{path} is cut off: its last line does not count the calls.")
    if end["calls"] != len(lines) - 2:
        raise TraceError(f"{path} has {len(lines) - 2} calls, but counts {end['calls']}.")
    entries = []
    for number, line in enumerate(lines[1:-1], 2):
        fields = _object(path, number, line)
        try:
            entries.append(Entry.of(fields))
        except (KeyError, TypeError, ValueError) as error:
            problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise TraceError(f"{path}, line {number} is no call: {problem}.") from error
    return Trace(str(header.get("source", "")), header["lease_ms"], entries)


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise TraceError(f"{path} is no trace: line {number} is no JSON object.")
    return value


def scripts_digest() -> str:
    """Returns a digest of the texts of all scripts."""
    texts = "\0".join(script_text(name) for name in SCRIPT_NAMES)
    return sha256(texts.encode()).hexdigest()[:16]


def texts_of(words: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(word.decode("utf-8", "surrogateescape") for word in words)


def plain_reply(reply: Any) -> Any:
    """Returns a reply that hiredis has read, as JSON values. RESP2 and RESP3 lead to equal
    values."""
    match reply:
        case bytes():
            return reply.decode("utf-8", "surrogateescape")
        case hiredis.ReplyError():
            return {"error": str(reply).partition(" script: ")[0]}  # then the script's digest
        case dict():
            return [plain_reply(part) for pair in reply.items() for part in pair]
        case list():
            return [plain_reply(item) for item in reply]
        case bool():
            return int(reply)
        case float():
            return f"{reply:.17g}"
        case _:
            return reply
