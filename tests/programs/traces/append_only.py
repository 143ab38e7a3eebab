"""Records the scripts of a run in the server's append-only file, and reads the file as a trace.

Each process sends its scripts with a few lines around them, which store the call, the server's time
and the reply under a key. The append-only file then has every call in the order of execution, also
calls whose caller or server was killed. Everything else in the file is a plain command.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import hiredis

from promptq.shared.protocol.keys import PREFIX
from promptq.shared.queue import request_queue
from promptq.shared.queue.call import script_text
from tests.programs.traces.trace_file import Entry, TraceWriter, texts_of

RECORD_VARIABLE = "PROMPTQ_CHAOS_RECORD"
"""The environment variable that is set in processes whose scripts are recorded."""

SERVER_SETTINGS = ("--auto-aof-rewrite-percentage", "0")
"""Settings with which the server keeps the whole append-only file."""

_KEY_NAME = "recorded_call"
_KEPT_MS = 60_000  # the audit looks for keys that live for ever

_BEFORE = """
local unrecorded, time_of_call = redis, redis.call('TIME')
local function with_one_time(invoke)
  return function(command, ...)
    if command == 'TIME' then return time_of_call end
    return invoke(command, ...)
  end
end
local redis = setmetatable({
  call = with_one_time(unrecorded.call), pcall = with_one_time(unrecorded.pcall),
}, {__index = unrecorded})
local function unrecorded_script()
"""
_AFTER = f"""
end
local function as_json(reply)
  local kind = type(reply)
  if kind == 'string' then return cjson.encode(reply) end
  if kind == 'number' then
    return string.format('%.0f', reply < 0 and math.ceil(reply) or math.floor(reply))
  end
  if kind == 'boolean' then return reply and '1' or 'null' end
  if kind ~= 'table' then return 'null' end
  if reply.err then return '{{"error":' .. cjson.encode(reply.err) .. '}}' end
  if reply.ok then return cjson.encode(reply.ok) end
  local parts = {{}}
  for _, item in ipairs(reply) do parts[#parts + 1] = as_json(item) end
  return '[' .. table.concat(parts, ',') .. ']'
end
local went_well, reply = pcall(unrecorded_script)
if not went_well and type(reply) ~= 'table' then reply = {{err = tostring(reply)}} end
local fields = {{
  '"at":' .. time_of_call[1] .. string.format('%06d', time_of_call[2]),
  '"script":' .. cjson.encode(script_name),
  '"keys":' .. as_json(KEYS), '"args":' .. as_json(ARGV), '"reply":' .. as_json(reply),
}}
local key = string.sub(KEYS[1], 1, -8) .. '{_KEY_NAME}'
unrecorded.call('SET', key, '{{' .. table.concat(fields, ',') .. '}}', 'PX', {_KEPT_MS})
if not went_well then error(reply) end
return reply
"""


def recorded_text(name: str) -> str:
    """Returns the text of a script that also stores each of its calls."""
    return f"local script_name = '{name}'\n{_BEFORE}{script_text(name)}{_AFTER}"


def record_scripts() -> None:
    """Make this process send scripts that store their calls. Does nothing unless the environment
    requires it."""
    if os.environ.get(RECORD_VARIABLE):
        request_queue.script_text = recorded_text


def write_trace(folder: Path, path: Path, source: str, lease_ms: int) -> None:
    """Write the trace in the append-only file of the server that ran in `folder`."""
    with path.open("w") as file:
        writer = TraceWriter(file, source, lease_ms)
        for entry in _entries(folder):
            writer.write(entry)
        writer.end()


def _entries(folder: Path) -> Iterator[Entry]:
    at_us: int | None = None
    early: list[list[tuple[str, ...]]] = []  # before the first time that is known
    for block in _blocks(folder):
        calls = [Entry.of(json.loads(words[2])) for words in block if _is_stored_call(words)]
        if calls:
            if at_us is None:
                for each in early:
                    yield from _plain_commands(calls[0].at_us, each)
            at_us = calls[-1].at_us
            yield from calls
        elif at_us is None:
            early.append(block)
        else:
            yield from _plain_commands(at_us, block)


def _plain_commands(at_us: int, block: list[tuple[str, ...]]) -> Iterator[Entry]:
    kept = [words for words in block if words[1:2] and not words[1].endswith(_KEY_NAME)]
    for nth, words in enumerate(kept, 1):
        yield Entry(at_us, "", (), words, goes_on=nth < len(kept))


def _is_stored_call(words: tuple[str, ...]) -> bool:
    return (
        words[0].upper() == "SET"
        and words[1].startswith(PREFIX)
        and words[1].endswith(f":{_KEY_NAME}")
    )


def _blocks(folder: Path) -> Iterator[list[tuple[str, ...]]]:
    """Yields what the server executed at once: a command, or a script's or transaction's ones."""
    block: list[tuple[str, ...]] | None = None
    for words in _commands(folder):
        match words[0].upper():
            case "SELECT":
                continue
            case "MULTI":
                block = []
            case "EXEC":
                yield block or []
                block = None
            case _ if block is not None:
                block.append(words)
            case _:
                yield [words]


def _commands(folder: Path) -> Iterator[tuple[str, ...]]:
    """Yields the commands of the append-only file, whose base is empty because it is never
    rewritten."""
    files = (folder / "appendonlydir").glob("*.incr.aof")
    for path in sorted(files, key=lambda file: int(file.name.split(".")[-3])):
        reader = hiredis.Reader()
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                reader.feed(chunk)
                while (words := reader.gets()) is not False:
                    yield texts_of(words)
