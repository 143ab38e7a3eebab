"""Builds calls to a queue's server and reads the replies. No code here does I/O.

A `Call` is one command or script. An `Operation` makes several calls, one round trip after the
other, until it has a result. Queues send calls, and clients run operations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Generic, TypeVar

from redis.exceptions import NoPermissionError, ResponseError

from promptq.shared.protocol.keys import PREFIX, Keys
from promptq.shared.queue.spoilt import UNREADABLE, is_wrong_type, note, spoilt_record

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Argument = str | bytes | int | memoryview

_LUA = resources.files("promptq.shared") / "lua"
_USES = "-- uses: "
_AT_ONCE = {"keys", "numbers", "server"}
"""The parts that every call uses. Another part runs when a call first uses it, because Redis would
otherwise make all functions of a script anew for each call, and most calls use few of them."""
_NOT_PERMITTED_IN_SCRIPT = ("The user executing the script can't", "ACL failure in script")
"""First words of the error if a script may not use a command. Redis 7.0 sends the first text."""

_FILES = (path.name for path in (_LUA / "scripts").iterdir())
SCRIPT_NAMES = tuple(sorted(name.removesuffix(".lua") for name in _FILES if name.endswith(".lua")))


@cache
def script_text(name: str) -> str:
    """Returns the text of a script, preceded by the library parts that the script uses. Each part
    becomes a Lua table. A part's local variables are visible only inside the part."""
    parts: dict[str, str] = {}
    text = _text_behind(f"scripts/{name}", parts)
    return "".join(parts.values()) + text


def _text_behind(file: str, parts: dict[str, str], users: tuple[str, ...] = ()) -> str:
    """Returns the text of a Lua file. Adds to `parts` the library parts that the file needs, in the
    order in which Lua must read them. Raises ValueError if parts use each other in a circle."""
    text = (_LUA / f"{file}.lua").read_text()
    first_line = text.partition("\n")[0]
    for name in first_line.removeprefix(_USES).split(", ") if first_line.startswith(_USES) else ():
        if name in users:
            raise ValueError(f"parts use each other in a circle: {' -> '.join((*users, name))}")
        if name not in parts:
            part = _text_behind(f"lib/{name}", parts, (*users, name))
            if name in _AT_ONCE:
                parts[name] = f"local {name} = {{}} do\n{part}end\n"
            else:
                load = (
                    f"function({name}, ...) setmetatable({name}, nil)\n{part}return {name}[...] end"
                )
                parts[name] = f"local {name} = setmetatable({{}}, {{__index = {load}}})\n"
    return text


@dataclass(frozen=True, slots=True)
class Call(Generic[T_co]):
    """A command or script to send, and the reader of its reply. `script` is empty for a command."""

    script: str
    args: Sequence[Argument]
    parse: Callable[[Any], T_co]
    of_spoilt: Callable[[], T_co] | None = None
    """Returns the value to use if the record breaks the protocol. If None, `read` raises."""
    of_refusal: Callable[[], T_co] | None = None
    """Returns the value to use if the server refuses the command. If None, `read` raises."""
    keys: Keys | None = None
    """The queue for which the script runs; if None, the queue that sends the call."""
    is_replicated: bool = False
    """Whether the replicas must have the script's writes before the call returns."""

    def key(self, sender: Keys) -> str:
        """Returns a key that the call uses. On a Cluster, the call goes to the node of this key."""
        first = self.args[1] if not self.script and len(self.args) > 1 else None
        if isinstance(first, str) and first.startswith(PREFIX):
            return first
        return (self.keys or sender).pending

    @property
    def name(self) -> str:
        """The call's name in error messages: `the script NAME`, or the key of a command. For HGET,
        also the field."""
        if self.script:
            return f"the script {self.script}"
        shown = self.args[1 : 3 if self.args[0] == "HGET" else 2]
        return " ".join(arg if isinstance(arg, str) else repr(arg) for arg in shown)

    def read(self, reply: Any) -> T_co:
        """Returns the value in a reply. If the reply is an error, raises the error.

        Raises SpoiltRecordError for a reply that breaks the protocol. Raises NoPermissionError if a
        command inside a script is forbidden, although servers report another error. If `of_refusal`
        or `of_spoilt` is set, returns the value of this function instead of such an error.
        """
        if self.of_refusal is not None and isinstance(reply, ResponseError):
            return self.of_refusal()
        if isinstance(reply, ResponseError) and str(reply).startswith(_NOT_PERMITTED_IN_SCRIPT):
            raise NoPermissionError(str(reply)) from reply
        if isinstance(reply, Exception):
            if self.of_spoilt is None or not is_wrong_type(reply):
                raise reply
            spoilt = spoilt_record(self.name, reply)
        else:
            try:
                return self.parse(reply)
            except UNREADABLE as error:
                spoilt = spoilt_record(self.name, error)
                if self.of_spoilt is None:
                    raise spoilt from error
        note(spoilt)
        return self.of_spoilt()


def named(**values: Argument) -> list[Argument]:
    """Returns a script's named arguments, in the form that `arguments.lua` reads.

    Leaves out empty values, because the scripts treat a missing argument as empty.
    """
    args: list[Argument] = ["promptq:named"]
    for pair in values.items():
        if pair[1] != "":
            args += pair
    return args


PAUSE = object()

Operation = Generator[Any, Any, T]
"""A generator that makes calls and returns a result.

It yields one call and receives its value, or yields a list of calls (one round trip) and receives
the list of values. An error is raised at the `yield`. During long work, the generator yields PAUSE.
"""


async def carry_out_async(operation: Operation[T], answer: Callable[[Any], Awaitable[Any]]) -> T:
    """Runs an operation to its end and returns its result. `answer` sends what the operation
    yields, and returns the values that the operation receives."""
    try:
        step = next(operation)
        while True:
            try:
                reply = await (asyncio.sleep(0) if step is PAUSE else answer(step))
            except BaseException as error:
                step = operation.throw(error)
            else:
                step = operation.send(reply)
    except StopIteration as stop:
        value: T = stop.value
        return value


def carry_out(operation: Operation[T], answer: Callable[[Any], Any]) -> T:
    """Runs an operation like `carry_out_async`, with an `answer` that is not a coroutine."""

    async def answer_at_once(step: Any) -> Any:
        return answer(step)

    carrying_out = carry_out_async(operation, answer_at_once)
    try:
        while True:
            carrying_out.send(None)  # the coroutine awaits only pauses
    except StopIteration as stop:
        value: T = stop.value
        return value


def text_of(value: str | bytes | int) -> str:
    """Returns the value as text. U+FFFD replaces bytes that are not UTF-8."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def texts_of(values: Iterable[Any]) -> list[str]:
    return [text_of(value) for value in values]


def ids_of(values: Iterable[bytes]) -> list[str]:
    """Returns the ids as text. Bytes that are not UTF-8 (other programs' ids) become surrogates."""
    return [value.decode("utf-8", "surrogateescape") for value in values]


def fields_of(reply: Any) -> dict[bytes, bytes]:
    """Returns the fields of a hash, or of a stream's entry, from a reply in RESP2 or RESP3."""
    return reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))


def text_map(reply: Any) -> dict[str, str]:
    """Returns the fields of a hash as text. U+FFFD replaces bytes that are not UTF-8."""
    return {text_of(name): text_of(value) for name, value in fields_of(reply).items()}
