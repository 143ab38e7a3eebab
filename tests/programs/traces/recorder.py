"""Records the commands that a server executes one at a time, in a world of the simulation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import hiredis

from promptq.shared.protocol.keys import PREFIX
from promptq.shared.queue.call import SCRIPT_NAMES, script_text
from tests.programs.traces.trace_file import Entry, TraceWriter, plain_reply, texts_of

_NOT_RECORDED = frozenset(
    b"ACL AUTH CLIENT COMMAND CONFIG DBSIZE DISCARD EXISTS GET HELLO HEXISTS HGET HGETALL HLEN"
    b" HMGET HVALS INFO LLEN LRANGE MGET PING PSUBSCRIBE PTTL PUBLISH PUNSUBSCRIBE QUIT RESET SCAN"
    b" SCRIPT SELECT SISMEMBER SMEMBERS SPUBLISH SSUBSCRIBE STRLEN SUBSCRIBE SUNSUBSCRIBE TIME TTL"
    b" TYPE UNSUBSCRIBE UNWATCH WATCH XLEN XRANGE XREAD XREVRANGE ZCARD ZCOUNT ZMSCORE ZRANGE ZRANK"
    b" ZSCORE".split()
)
"""Plain commands that change no key. Any other command is recorded."""


class Recorder:
    """Writes scripts and changes to a trace. The commands of a transaction stay together."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self._names = {
            hashlib.sha1(script_text(name).encode()).hexdigest().encode(): name
            for name in SCRIPT_NAMES
        }
        self._queued: dict[object, list[Sequence[bytes]]] = {}
        """By connection, the commands since its MULTI."""

    def note(
        self, connection: object, by: str, at_us: int, command: Sequence[bytes], replies: bytes
    ) -> None:
        """Record a command that the server executed, with the bytes of its reply."""
        name = command[0].upper()
        if name == b"MULTI":
            self._queued[connection] = []
        elif name == b"DISCARD":
            self._queued.pop(connection, None)
        elif name == b"EXEC":
            queued = self._queued.pop(connection, [])
            answers = _read(replies)
            if isinstance(answers, list):  # otherwise the server executed nothing
                changes = [
                    (each, answer)
                    for each, answer in zip(queued, answers, strict=True)
                    if self._is_recorded(each)
                ]
                for nth, (each, answer) in enumerate(changes, 1):
                    self._write(by, at_us, each, answer, goes_on=nth < len(changes))
        elif connection in self._queued:
            self._queued[connection].append(command)
        elif self._is_recorded(command):
            self._write(by, at_us, command, _read(replies))

    def _is_recorded(self, command: Sequence[bytes]) -> bool:
        """Returns whether a command may change a key of promptq. RQ has other keys and scripts."""
        name = command[0].upper()
        if name == b"EVALSHA":
            return command[1] in self._names
        keys = command[1:2]
        is_of_promptq = name == b"EVAL" or any(key.startswith(PREFIX.encode()) for key in keys)
        return is_of_promptq and name not in _NOT_RECORDED

    def _write(
        self, by: str, at_us: int, command: Sequence[bytes], reply: object, goes_on: bool = False
    ) -> None:
        name = command[0].upper()
        script, keys, words = "", (), tuple(command)
        if name in (b"EVAL", b"EVALSHA"):
            if isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT"):
                return
            is_text = name == b"EVAL"
            digest = hashlib.sha1(command[1]).hexdigest().encode() if is_text else command[1]
            num_keys = int(command[2])
            script, keys = self._names[digest], texts_of(command[3 : 3 + num_keys])
            words = tuple(command[3 + num_keys :])
        args, answer = texts_of(words), plain_reply(reply)
        self._writer.write(Entry(at_us, script, keys, args, answer, by, goes_on))


def _read(replies: bytes) -> object:
    reader = hiredis.Reader()
    reader.feed(replies)
    return reader.gets()
