"""Makes small pictures."""

from __future__ import annotations

import struct
import zlib
from random import Random


def png(seed: int, width: int = 64, height: int = 64, *, num_rows: int | None = None) -> bytes:
    """Returns a PNG of random grey pixels. Its data may have fewer rows than its header says."""
    random = Random(seed)
    rows = (
        b"\0" + random.randbytes(width) for _ in range(height if num_rows is None else num_rows)
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(b"".join(rows)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")
