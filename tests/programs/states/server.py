"""Sets a real server to any state, runs a real script there, and returns the outcome.

The scripts are those that workers send, with a few lines before them that stop the clock, record
published messages, and end endless scripts. One round trip sets the state, makes the calls, and
reads the outcome. To replay a trace, the server keeps its state and its clock.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import hiredis

from promptq.shared.errors import PromptqError
from promptq.shared.queue.call import SCRIPT_NAMES, script_text
from tests.programs.states.calls import Move
from tests.programs.states.world import KEYS, NOW_MS

_HEARD, _NOW, _CHANGES = "heard", "now", "changes"
"""Keys of the explorer: the published messages; the server's state when it was last set or read;
the server's number of changes at that time."""

_CHUNK = 100

_MOST_COMMANDS = 10_000
"""More commands than any script sends in a small world, unless it never ends."""

_OBSERVED = f"""
local unobserved, pinned, num_commands = redis, {{}}, 0
local function observed(invoke)
  return function(command, ...)
    num_commands = num_commands + 1
    if num_commands > {_MOST_COMMANDS} then error('the script does not end') end
    if pinned[command] then return pinned[command] end
    if string.find(command, 'PUBLISH$') then unobserved.call('RPUSH', '{_HEARD}', ...) end
    return invoke(command, ...)
  end
end
local redis = setmetatable({{
  call = observed(unobserved.call), pcall = observed(unobserved.pcall),
}}, {{__index = unobserved}})
"""

_PINNED_CLOCK = f"pinned.TIME = {{'{NOW_MS // 1000}', '0'}}\n"

_REMEMBER = f"""
local function count_changes()
  local told = redis.call('INFO', 'persistence')
  return tonumber(string.match(told, 'rdb_changes_since_last_save:(%d+)'))
end
local function remember(state)
  redis.call('SET', '{_NOW}', state)
  redis.call('SET', '{_CHANGES}', count_changes() + 1) -- with this one
end
"""

_PUT_BACK = f"""{_REMEMBER}
if redis.call('GET', '{_NOW}') == ARGV[1] then return end
local old = redis.call('KEYS', '*')
if #old > 0 then redis.call('DEL', unpack(old)) end
for _, item in ipairs(cjson.decode(ARGV[1])) do
  local key, kind, values, has_expiry = item[1], item[2], item[3], item[4]
  if kind == 'hash' then redis.call('HSET', key, unpack(values))
  elseif kind == 'zset' then
    for n = 1, #values, 2 do redis.call('ZADD', key, values[n + 1], values[n]) end
  elseif kind == 'stream' then
    for _, entry in ipairs(values) do redis.call('XADD', key, entry[1], unpack(entry[2])) end
  elseif kind == 'list' then redis.call('RPUSH', key, unpack(values))
  elseif kind == 'set' then redis.call('SADD', key, unpack(values))
  else redis.call('SET', key, values[1]) end
  if has_expiry then redis.call('PEXPIRE', key, 3600000) end
end
remember(ARGV[1])
"""

_READ = f"""{_REMEMBER}
if count_changes() == tonumber(redis.call('GET', '{_CHANGES}')) then return {{false, {{}}}} end
local heard = redis.call('LRANGE', '{_HEARD}', 0, -1)
redis.call('DEL', '{_HEARD}')
local keys, items = redis.call('KEYS', '*'), {{}}
table.sort(keys)
for _, key in ipairs(keys) do
  local kind, values = redis.call('TYPE', key).ok, nil
  if kind == 'hash' then
    local pairs_of, fields, found = redis.call('HGETALL', key), {{}}, {{}}
    for n = 1, #pairs_of, 2 do
      fields[#fields + 1] = pairs_of[n]
      found[pairs_of[n]] = pairs_of[n + 1]
    end
    table.sort(fields)
    values = {{}}
    for n, field in ipairs(fields) do values[2 * n - 1], values[2 * n] = field, found[field] end
  elseif kind == 'zset' then values = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  elseif kind == 'stream' then values = redis.call('XRANGE', key, '-', '+')
  elseif kind == 'list' then values = redis.call('LRANGE', key, 0, -1)
  elseif kind == 'set' then
    values = redis.call('SMEMBERS', key)
    table.sort(values)
  else values = {{redis.call('GET', key)}} end
  if key ~= '{_NOW}' and key ~= '{_CHANGES}' then
    items[#items + 1] = {{key, kind, values, redis.call('PTTL', key) >= 0}}
  end
end
local text = #items > 0 and cjson.encode(items) or '[]'
remember(text)
return {{text, heard}}
"""


class Outcome(NamedTuple):
    """The outcome of a move: the new state, the answer to each call, and the published events."""

    after: bytes
    answers: list[Any]
    """The value of each call's `parse`, or the PromptqError that it raised."""
    heard: list[tuple[str, str]]
    """The published messages: channel and message."""


class StatesServer:
    """One connection to a server that nobody else uses. `texts` are scripts by name.

    An error inside a script is an answer too: a `hiredis.ReplyError`. With `keeps_clock`, scripts
    see the server's clock; otherwise the clock stands still.
    """

    def __init__(
        self,
        server: int | socket.socket,
        texts: Mapping[str, str] | None = None,
        *,
        keeps_clock: bool = False,
    ) -> None:
        if isinstance(server, int):
            self._socket = socket.create_connection(("127.0.0.1", server))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            self._socket = server
        self._reader = hiredis.Reader()
        texts = texts or {name: script_text(name) for name in SCRIPT_NAMES}
        before = _OBSERVED if keeps_clock else _OBSERVED + _PINNED_CLOCK
        self._digests = {name: self._load(before + text) for name, text in texts.items()}
        self._put_back, self._read = self._load(_PUT_BACK), self._load(_READ)

    def close(self) -> None:
        self._socket.close()

    def step(self, before: bytes, move: Move) -> Outcome:
        """Make one move in the state `before`. Returns the outcome."""
        return next(self.steps([(before, move)]))

    def steps(self, wanted: Iterable[tuple[bytes, Move]]) -> Iterator[Outcome]:
        """Make each move in its state, and yield the outcomes in order. The server makes the next
        moves while the caller checks an outcome."""
        moves = iter(wanted)
        sent: list[tuple[bytes, Move]] = []
        while True:
            chunk = list(islice(moves, _CHUNK))
            packed = b"".join(self._packed(before, move) for before, move in chunk)
            if packed:
                self._socket.sendall(packed)
            for before, move in sent:
                yield self._receive(before, move)
            sent = chunk
            if not sent:
                return

    def call(self, script: str, keys: Sequence[str], args: Sequence[bytes]) -> Any:
        """Returns the reply to a script, or to the command in `args`, in the present state."""
        head = ["EVALSHA", self._digests[script], len(keys), *keys] if script else []
        self._socket.sendall(_command(*head, *args))
        return self._reply(raises=False)

    def read(self, before: bytes) -> tuple[bytes, list[tuple[str, str]]]:
        """Returns the present state, and the messages published since `before` was read."""
        self._socket.sendall(_command("EVALSHA", self._read, 0))
        after, heard = self._reply()
        return after or before, _messages(heard)

    def _packed(self, before: bytes, move: Move) -> bytes:
        parts = [_command("EVALSHA", self._put_back, 0, before)]
        for call in move.calls:
            if call.script:
                digest = self._digests[call.script]
                parts.append(_command("EVALSHA", digest, 1, KEYS.pending, *call.args))
            else:
                parts.append(_command(*call.args))
        parts.append(_command("EVALSHA", self._read, 0))
        return b"".join(parts)

    def _receive(self, before: bytes, move: Move) -> Outcome:
        self._reply()
        answers: list[Any] = []
        for call in move.calls:
            reply = self._reply(raises=False)
            if isinstance(reply, hiredis.ReplyError):
                answers.append(reply)
                continue
            try:
                answers.append(call.parse(reply))
            except PromptqError as refusal:
                answers.append(refusal)
        after, heard = self._reply()
        return Outcome(after or before, answers, _messages(heard))

    def _reply(self, raises: bool = True) -> Any:
        while (reply := self._reader.gets()) is False:
            received = self._socket.recv(1 << 20)
            if not received:
                raise ConnectionError("the server went away")
            self._reader.feed(received)
        if raises and isinstance(reply, hiredis.ReplyError):
            raise reply
        return reply

    def _load(self, text: str) -> bytes:
        self._socket.sendall(_command("SCRIPT", "LOAD", text))
        digest: bytes = self._reply()
        return digest


def _messages(heard: list[bytes]) -> list[tuple[str, str]]:
    texts = [item.decode() for item in heard]
    return list(zip(texts[::2], texts[1::2], strict=True))


def _command(*args: str | bytes | int) -> bytes:
    packed: bytes = hiredis.pack_command(args)
    return packed
