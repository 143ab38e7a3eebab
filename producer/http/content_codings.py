"""Decodes compressed bodies piece by piece."""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from typing import Protocol

from promptq.producer.calls.errors import ApiError

_PIECE_BYTES = 65_536
_MOST_CODINGS = 4
_MOST_SMALL_MEMBERS = 64
_MEMBER_BYTES = 4096
"""The smallest mean size of a body's members (gzip) or frames (zstd), not counting the first
`_MOST_SMALL_MEMBERS`. Each member has a fixed cost."""
_MOST_WINDOW_LOG = 23
"""Base-2 logarithm of the largest window of a zstd frame: 8 MiB, as in RFC 9659."""


class _Decoder(Protocol):
    """Decoder of one member of a compressed body, like `lzma.LZMADecompressor`."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Zlib:
    def __init__(self, wbits: int) -> None:
        self._zlib = zlib.decompressobj(wbits)
        self._rest = b""
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece = self._zlib.decompress(self._rest + data, max_length)
        self._rest = self._zlib.unconsumed_tail
        self.needs_input = not self._rest and len(piece) < max_length
        return piece


_CODINGS = ("gzip", "x-gzip", "deflate", "zstd")
_SERVED = "gzip, deflate, zstd"


def _decoder_of(coding: str, begin: bytes) -> tuple[_Decoder, type[Exception]]:
    """Returns a decoder for a member that begins with `begin`, and the decoder's exception."""
    if coding == "zstd":
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd  # imported only when it is needed: few clients use it
        window = zstd.DecompressionParameter.window_log_max
        return zstd.ZstdDecompressor(options={window: _MOST_WINDOW_LOG}), zstd.ZstdError
    if coding != "deflate":
        return _Zlib(16 + zlib.MAX_WBITS), zlib.error
    has_header = begin[0] & 0x0F == 8  # some clients leave out the header of zlib
    return _Zlib(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS), zlib.error


def codings_of(headers: Sequence[str]) -> list[str]:
    """Returns the codings in a body's `Content-Encoding` headers, in the order of decoding. Raises
    ApiError 415 for an unsupported coding."""
    codings = [coding.strip().lower() for coding in ",".join(headers).split(",")]
    codings = [coding for coding in codings if coding not in ("", "identity")]
    wrong = [coding for coding in codings if coding not in _CODINGS]
    if wrong or len(codings) > _MOST_CODINGS:
        reason = f"{wrong[0][:80]!r} is not one of" if wrong else f"at most {_MOST_CODINGS} of"
        raise ApiError(
            415,
            f"Content-Encoding: {reason} {_SERVED}",
            param="Content-Encoding",
            code="unsupported_encoding",
            headers={"Accept-Encoding": _SERVED},
        )
    return codings[::-1]


async def decoded(pieces: AsyncIterable[bytes], coding: str) -> AsyncGenerator[bytes, None]:
    """Yields the decoded pieces of a body. Lets other tasks run after each piece. Raises ApiError
    400 if the body is not in this coding, or ends too early."""
    decoder: _Decoder | None = None
    wrong_data: type[Exception] = zlib.error
    num_members = num_bytes = 0
    async for data in pieces:
        while data or (decoder is not None and not (decoder.eof or decoder.needs_input)):
            if decoder is None or decoder.eof:
                num_members += 1
                if num_members > _MOST_SMALL_MEMBERS + num_bytes // _MEMBER_BYTES:
                    raise _wrong(f"has too many small parts in {coding}")
                decoder, wrong_data = _decoder_of(coding, data)
            try:
                piece = decoder.decompress(data, _PIECE_BYTES)
            except wrong_data as error:
                raise _wrong(f"is not {coding}, as Content-Encoding says: {error}") from None
            data = decoder.unused_data if decoder.eof else b""
            if piece:
                num_bytes += len(piece)
                yield piece
                await asyncio.sleep(0)
    if decoder is not None and not decoder.eof:
        raise _wrong(f"ends in the middle of its {coding}")


def _wrong(what: str) -> ApiError:
    return ApiError(400, f"the body {what}", param="Content-Encoding")
