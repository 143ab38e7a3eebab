"""What `Preparing` starts: reads calls one by one, until its input ends.

Run as `python -m promptq.producer.gateway.answering.prepare_process`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

from promptq.producer.gateway.answering.preparing import LENGTH_BYTES, OUT_OF_MEMORY, answer, head

_MOST_BYTES = 2 << 30
"""Of memory. The worst body of 8 MB that is well-formed takes half of it."""
_NICENESS = 15


def main() -> None:
    """Bounded, and after what streams where both want to compute."""
    # What is sent to all processes of a terminal or a service is the gateway's to heed: this one
    # ends with its input.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # bodies are nobody's to find on a disk
    os.nice(_NICENESS)
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    while length := incoming.read(LENGTH_BYTES):
        asked = json.loads(incoming.read(int.from_bytes(length, "big")))
        try:
            _answer_one(asked, incoming.read(asked["sizes"][0]), outgoing)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)


def _answer_one(asked: dict[str, Any], body: bytes, outgoing: BinaryIO) -> None:
    """SIGPROF ends the process where that takes more than its share of CPU time."""
    signal.setitimer(signal.ITIMER_PROF, asked["cpu_seconds"])
    told, payloads = answer(asked, body)
    outgoing.write(head(told, [len(it) for it in payloads]))
    outgoing.writelines(payloads)
    outgoing.flush()
    signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
