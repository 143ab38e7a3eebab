"""The process that `CallReader` starts. It reads calls one after the other, until its input ends.

Run as `python -m promptq.producer.apis.call_reader_process`. Its arguments are the level and the
format of its log.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

from promptq.producer.apis.readers import READERS
from promptq.producer.calls.call_reader import LENGTH_BYTES, OUT_OF_MEMORY, answer, head
from promptq.shared.runtime.logs import configure_logs

_MOST_BYTES = 2 << 30
"""The limit of the process's memory. The worst well-formed body of 8 MB takes half of it."""
_NICENESS = 15


def main() -> None:
    """Answers calls with limited memory, and at a lower priority than the gateway's streams."""
    # Signals to all processes of a terminal or service are for the gateway: this process ends when
    # its input ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a body must not be left on a disk
    os.nice(_NICENESS)
    configure_logs(*sys.argv[1:])
    incoming, outgoing = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing printed may come between answers
    while length := incoming.read(LENGTH_BYTES):
        query = json.loads(incoming.read(int.from_bytes(length, "big")))
        try:
            _answer_one(query, [incoming.read(size) for size in query["sizes"]], outgoing)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)


def _answer_one(query: dict[str, Any], parts: list[bytes], outgoing: BinaryIO) -> None:
    """Answers one query. SIGPROF ends the process if this takes too much CPU time."""
    signal.setitimer(signal.ITIMER_PROF, query["cpu_seconds"])
    reply, payloads = answer(READERS, query, parts)
    outgoing.write(head(reply, [len(payload) for payload in payloads]))
    outgoing.writelines(payloads)
    outgoing.flush()
    signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
