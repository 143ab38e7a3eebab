"""What `Preparing` starts: reads calls one by one, until its input ends.

Run as `python -m promptq.producer.gateway.answering.prepare_process`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import BinaryIO

from promptq.producer.gateway.answering.preparing import answer, frame

_MOST_BYTES = 2 << 30
"""Of memory. The worst body of 8 MB that is well-formed takes half of it."""
_NICENESS = 15


def main() -> None:
    """Bounded, and after what streams where both want to compute."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at a terminal it is the gateway's to end this
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    os.nice(_NICENESS)
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    while length := incoming.read(4):
        asked = json.loads(incoming.read(int.from_bytes(length, "big")))
        _answer_one(asked, incoming.read(asked["sizes"][0]), outgoing)


def _answer_one(asked: dict[str, object], body: bytes, outgoing: BinaryIO) -> None:
    outgoing.write(frame(*answer(asked, body)))
    outgoing.flush()


if __name__ == "__main__":
    main()
