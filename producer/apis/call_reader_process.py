"""The child process in which a gateway parses the bodies of calls. `CallReader` starts this
process, and sends queries to its standard input. The process answers one query at a time.

`python -m promptq.producer.apis.call_reader_process LOG_LEVEL LOG_FORMAT` runs the process.
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

_MOST_BYTES = 2 << 30  # bytes of memory; the worst valid body of 8 MB needs half
_NICENESS = 15


def main() -> None:
    """Answers queries, with limited memory, and with a lower CPU priority than the gateway."""
    # A terminal or service manager sends these signals to all processes. This process ends when the
    # gateway closes its input.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would put bodies on the disk
    os.nice(_NICENESS)
    configure_logs(*sys.argv[1:])
    incoming, outgoing = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # printed text must not get into an answer
    while length := incoming.read(LENGTH_BYTES):
        query = json.loads(incoming.read(int.from_bytes(length, "big")))
        try:
            _answer_one(query, [incoming.read(size) for size in query["sizes"]], outgoing)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)


def _answer_one(query: dict[str, Any], parts: list[bytes], outgoing: BinaryIO) -> None:
    """Answers one query. SIGPROF ends the process if the answer takes too much CPU time."""
    signal.setitimer(signal.ITIMER_PROF, query["cpu_seconds"])
    reply, payloads = answer(READERS, query, parts)
    outgoing.write(head(reply, [len(payload) for payload in payloads]))
    outgoing.writelines(payloads)
    outgoing.flush()
    signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
