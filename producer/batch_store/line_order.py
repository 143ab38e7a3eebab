"""The order in which the lines of a batch run: lines with the same beginning follow each other.

So a worker computes a common beginning, such as a document, once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from promptq.producer.batch_store.input_file import MAX_LINE_BYTES, lines_at
from promptq.producer.clients.affinity import PREFIXES

_INPUTS = (b'"messages"', b'"prompt"', b'"input"')


def lines_by_prefix(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the number and the bytes of each line of `lines_at`, grouped by the beginning of the
    line's input. A group stands at the place of its first line. Inside a group, lines with a longer
    common beginning follow each other.

    Reads the whole file before the first line is yielded.
    """
    first_lines: dict[bytes, int] = {}
    order = []
    for number, offset, raw in lines_at(path):
        firsts = [first_lines.setdefault(key, number) for key in _beginnings(raw)]
        order.append((*firsts, number, offset))
    order.sort()
    return _read([line[-2:] for line in order], path)


def _beginnings(raw: bytes) -> Iterator[bytes]:
    """Yields the hash of each beginning that the input of a line has."""
    body = max(0, raw.find(b'"body"'))
    start = min((at for name in _INPUTS if (at := raw.find(name, body)) >= 0), default=body)
    hashed, done = hashlib.blake2b(digest_size=16), start
    for length in PREFIXES:
        if start + length > len(raw):
            return
        hashed.update(raw[done : start + length])
        done = start + length
        yield hashed.digest()


def _read(places: list[tuple[int, ...]], path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, offset in places:
            file.seek(offset)
            yield number, file.readline(MAX_LINE_BYTES + 1)
