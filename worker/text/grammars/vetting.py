"""Compiles new grammars in a separate process, which ends if a grammar needs too much.

llguidance's limits are not enough: time and memory may double with each further pattern of a
schema, in one call that cannot be interrupted. A worker compiles a grammar only after this process
has compiled it within the limits below. The process runs this module.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from typing import IO, Any, cast

from promptq.worker.text.grammars.llguidance_calls import Vocabulary, compile_grammar, reason_of

COMPILE_SECONDS = 1.0
"""The most CPU seconds that one grammar may take, for compiling and its first masks together."""
COMPILE_BYTES = 128 * 2**20
"""The most bytes of memory that one grammar may take."""
MASK_SECONDS = 0.1
"""The most CPU seconds that one mask may take. In a worker, all sequences of a step wait for it."""
_MASKS = 32
_WALL_SECONDS = 25.0
"""The most seconds of wall-clock time for a grammar, also on a busy machine."""
_ENVIRONMENT = ("PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""The only environment variables of the vetting process. Others may have Redis' password."""
_LIMIT_SIGNALS = (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV)
"""The signals that end the vetting process at its limits. Other signals come from outside."""


class NotVettedError(Exception):
    """Raised if a grammar takes too much time or memory, or cannot be tested. The message says why.

    `is_certain` is False if the next try may succeed.
    """

    def __init__(self, message: str, *, is_certain: bool = True) -> None:
        super().__init__(message)
        self.is_certain = is_certain


class Vetter:
    """Controls the process that tests a worker's grammars, one at a time. Thread-safe.

    The process starts when it is first needed, and again after it has ended.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def vet(self, grammar: str) -> str:
        """Returns the reason why llguidance refuses a grammar; empty if llguidance accepts it.
        Raises NotVettedError if the grammar takes too much time or memory, or cannot be tested."""
        with self._lock:  # two tries, because the process may have been killed before this call
            reply = self._ask(grammar) or self._ask(grammar)
        if reply is None:
            raise NotVettedError(
                "could not be tested: the process that tests grammars ends at once",
                is_certain=False,
            )
        if too_much := reply["too_much"]:
            raise NotVettedError(too_much)
        return reply["error"]

    def _ask(self, grammar: str) -> dict[str, str] | None:
        """Returns the vetting process' reply; None if the process ended without a reply. Raises
        NotVettedError if the process ended because of a limit."""
        process = self._process = self._process or self._start()
        is_overdue = threading.Event()

        def give_up() -> None:
            is_overdue.set()
            process.kill()

        overdue = threading.Timer(_WALL_SECONDS, give_up)
        overdue.start()
        reply: dict[str, str] | None = None
        try:
            with suppress(OSError):
                _write(process.stdin, grammar)
                reply = _read(process.stdout)
        finally:
            overdue.cancel()
        if reply is None:
            process.wait()
            self._end(process)
            if -process.returncode in _LIMIT_SIGNALS:
                raise NotVettedError(
                    f"takes too long to compile: more than {COMPILE_SECONDS:g} s, or"
                    f" {COMPILE_BYTES // 2**20} MiB of memory"
                )
            if is_overdue.is_set():
                raise NotVettedError(
                    f"could not be tested within {_WALL_SECONDS:g} s: the machine is too busy",
                    is_certain=False,
                )
        return reply

    def close(self) -> None:
        """End the vetting process, if it runs."""
        with self._lock:
            if self._process is not None:
                self._end(self._process)

    def _start(self) -> subprocess.Popen[bytes]:
        # llguidance may quote the grammar on standard error.
        process = subprocess.Popen(  # noqa: S603 # this Python, a module of ours
            [sys.executable, "-P", "-m", __spec__.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )
        with suppress(OSError):  # reading the reply reports that the process has ended
            _write(process.stdin, asdict(self._vocabulary))
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # the process no longer reads the rest
                cast("IO[bytes]", pipe).close()


def _write(pipe: IO[bytes] | None, message: Any) -> None:
    pipe = cast("IO[bytes]", pipe)
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


def _read(pipe: IO[bytes] | None) -> Any:
    """Returns the next message; None at the end of the pipe."""
    line = cast("IO[bytes]", pipe).readline()
    return json.loads(line) if line.endswith(b"\n") else None


def main() -> None:
    """Test one grammar after another, until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a draining worker may still need this process
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, replies = sys.stdin.buffer, sys.stdout.buffer
    fields = _read(source)
    if fields is None:
        return
    vocabulary = Vocabulary(**fields).load()
    _limit_memory()
    while (grammar := _read(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)  # its signal ends the process
        try:
            reply = _try_out(grammar, vocabulary)
        except BaseException:  # no memory, or a panic of llguidance
            os.abort()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(replies, reply)


def _try_out(grammar: str, vocabulary: Any) -> dict[str, str]:
    """Compile a grammar, and compute the masks along one random output. Returns the reply."""
    matcher = compile_grammar(vocabulary, grammar)
    if matcher.is_error():
        return {"error": reason_of(matcher), "too_much": ""}
    rng = random.Random(0)  # noqa: S311 # the same choices each time
    for _ in range(_MASKS):
        started_at = time.process_time()
        mask = matcher.compute_bitmask()
        if time.process_time() - started_at > MASK_SECONDS:
            return {"error": "", "too_much": f"takes more than {MASK_SECONDS:g} s for a token"}
        allowed = [token_id for token_id in _tokens(mask) if token_id not in vocabulary.eos_tokens]
        if not allowed or not matcher.consume_token(rng.choice(allowed)):
            break
    if matcher.is_error():  # llguidance compiles some grammars that fail later
        return {"error": reason_of(matcher), "too_much": ""}
    if not (allowed or matcher.is_accepting() or matcher.is_stopped()):
        return {"error": "no text matches it", "too_much": ""}
    return {"error": "", "too_much": ""}


def _tokens(mask: bytes) -> list[int]:
    bits = int.from_bytes(mask, "little")
    return [n for n, bit in enumerate(reversed(f"{bits:b}")) if bit == "1"]


def _limit_memory() -> None:
    try:
        with open("/proc/self/statm") as sizes:
            used = int(sizes.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux; the time limit also limits the memory
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + COMPILE_BYTES, most))


if __name__ == "__main__":
    main()
