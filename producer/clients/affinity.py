"""Hashes that lead requests with the same beginning to a worker that has already computed it.

The hashes are hints: a wrong hash changes only the order in which workers take a tenant's requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from pydantic_core import to_json

from promptq.shared.protocol.request import Request

PREFIXES = (1_024, 4_096, 16_384, 65_536)
"""Lengths in bytes of the beginnings that have a hash."""


def affinity_of(request: Request) -> str:
    """Returns hashes, separated by spaces: of the session (`-` without a session), then of the
    beginnings of the prompt or chat, the shortest first. Empty if there is nothing to hash."""
    session, prompt, salt = request.session, request.prompt, request.cache_salt or ""
    if session is None and isinstance(prompt, str) and len(prompt) < PREFIXES[0] // 4:
        return ""  # a character has at most 4 bytes
    owner = to_json([request.tenant or "", salt])
    hashes = ["-" if session is None else _hash(owner, to_json(session)).hexdigest()]
    hashes += _prefix_hashes(owner, request)
    return "" if hashes == ["-"] else " ".join(hashes)


def _prefix_hashes(owner: bytes, request: Request) -> Iterator[str]:
    """Yields the hash of each beginning that the text has."""
    text = bytearray()
    pieces = _pieces(request)
    rolling, end = _hash(owner), 0
    for length in PREFIXES:
        while len(text) < length and (piece := next(pieces, None)) is not None:
            text += piece[: PREFIXES[-1]]
        if len(text) < length:
            return
        rolling.update(memoryview(text)[end:length])
        end = length
        yield rolling.hexdigest()


def _pieces(request: Request) -> Iterator[bytes]:
    if isinstance(request.prompt, str):
        yield request.prompt[: PREFIXES[-1]].encode()
    elif request.prompt is not None:
        yield to_json(request.prompt[: PREFIXES[-1] // 2])  # an id and a comma or more
    for name in ("chat_template_kwargs", "tools"):
        if getattr(request, name):
            yield to_json(getattr(request, name))
    yield from map(to_json, request.messages or ())


def _hash(*parts: bytes) -> hashlib.blake2b:
    rolling = hashlib.blake2b(digest_size=8)
    for part in parts:
        rolling.update(part)
    return rolling
