"""Pictures in the messages of a chat: parts with a data URL (RFC 2397)."""

from __future__ import annotations

import binascii
import re
import struct
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

MAX_PICTURES = 64
MAX_PIXELS = 2**26
"""The most pixels of all pictures of a request. A decoder needs 3 bytes or more for each pixel."""

STORED_CHARS = 65_536
"""A picture with a longer data URL is stored apart from the payloads, which only name it."""

_STORED = re.compile(r"sha256:[0-9a-f]{64}")
_HEADER = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,")
_REMOTE = re.compile("https?://")
_PIXELS_OF_TOKEN = 28 * 28
_MOST_TOKENS = 16_384
"""The largest estimate for one picture. Most models scale a picture down to fewer tokens."""
_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""JPEG markers that begin a frame. The frame's header has the size of the picture."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture in a message, with its size in pixels.

    `url` is the picture's data URL, or the name of a stored picture, whose size is unknown (0).
    """

    url: str
    width: int
    height: int

    @property
    def is_stored(self) -> bool:
        return _STORED.fullmatch(self.url) is not None

    @property
    def num_tokens(self) -> int:
        """Estimated number of tokens of the picture. Only the model's processor knows exactly."""
        return min(1 + self.width * self.height // _PIXELS_OF_TOKEN, _MOST_TOKENS)


def picture_part(url: str) -> dict[str, Any]:
    """Returns the part of a message for a picture."""
    return {"type": "image_url", "image_url": {"url": url}}


def content_of(parts: Iterable[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Returns the content of a message with these texts and pictures: one text, or the parts if
    there are pictures."""
    parts = [*parts]
    return parts if any(map(is_picture, parts)) else "".join(part["text"] for part in parts)


def data_url(content: bytes) -> str:
    """Returns the data URL of a picture. Raises ValueError if the picture is of no known kind."""
    return f"data:image/{_kind_of(content)};base64,{b64encode(content).decode('ascii')}"


def is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image_url"


def set_apart(
    messages: Iterable[dict[str, Any]], tenant: str
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns normalised messages with names in place of large pictures, and the data URLs of these
    pictures by name. A name depends on the tenant, so tenants share no stored picture."""
    stored: dict[str, str] = {}

    def name_in(url: str) -> str:
        if len(url) <= STORED_CHARS:
            return url
        name = sha256(f"{tenant}\n{url}".encode()).hexdigest()
        stored[name] = url
        return f"sha256:{name}"

    return _with_urls(messages, name_in), stored


def put_back(messages: Any, stored: Mapping[str, str]) -> Any:
    """Returns the messages with data URLs in place of the names of pictures. `stored` maps names to
    data URLs. Messages that are not valid stay unchanged."""
    urls = {f"sha256:{name}": url for name, url in stored.items()}
    try:
        return _with_urls(messages, lambda url: urls.get(url, url))
    except (AttributeError, KeyError, TypeError):
        return messages


def check_found(pictures: Iterable[Picture]) -> None:
    """Raises ValueError if a picture's data URL is missing, so that `url` is still a name."""
    for picture in pictures:
        if picture.is_stored:
            raise ValueError(
                f"messages: the picture {picture.url} is not stored with this request, or no longer"
            )


def _with_urls(
    messages: Iterable[dict[str, Any]], changed: Callable[[str], str]
) -> list[dict[str, Any]]:
    return [
        {
            **message,
            "content": [
                picture_part(changed(part["image_url"]["url"])) if is_picture(part) else part
                for part in content
            ],
        }
        if isinstance(content := message["content"], list)
        else message
        for message in messages
    ]


def pictures_of(messages: Iterable[Mapping[str, Any]]) -> tuple[Picture, ...]:
    """Returns the pictures of normalised messages, in order.

    Raises ValueError, which names the picture that cannot be read, or is too large.
    """
    pictures: list[Picture] = []
    for index, message in enumerate(messages):
        content = message["content"]
        parts = filter(is_picture, content if isinstance(content, list) else ())
        for number, part in enumerate(parts):
            try:
                pictures.append(_read(part["image_url"]["url"]))
                if len(pictures) > MAX_PICTURES:
                    raise ValueError(f"a request may have at most {MAX_PICTURES} pictures")
                if sum(each.width * each.height for each in pictures) > MAX_PIXELS:
                    raise ValueError(
                        f"the pictures up to this one have more than {MAX_PIXELS} pixels in all"
                    )
            except ValueError as error:
                where = f"messages[{index}].content: picture {number}"
                raise ValueError(f"{where}: {error}") from None
    return tuple(pictures)


def _read(url: str) -> Picture:
    """Returns a picture with the size that its header states. Raises ValueError."""
    if _STORED.fullmatch(url):
        return Picture(url, 0, 0)
    if (header := _HEADER.match(url)) is None:
        hint = "; only the gateway and batches fetch pictures" if _REMOTE.match(url) else ""
        raise ValueError(
            "a picture's URL must begin with data:image/png;base64, (or jpeg, gif, webp), got"
            f" {url[:40]!r}{hint}"
        )
    try:
        content = b64decode(url[header.end() :], validate=True)
    except binascii.Error as error:
        raise ValueError(f"the picture is no base64: {error}") from None
    try:
        width, height = _size_in(content)
    except (struct.error, IndexError):
        raise ValueError("the picture ends within its header") from None
    if not (width and height):
        raise ValueError(f"the picture has {width} times {height} pixels")
    return Picture(url, width, height)


def _kind_of(content: bytes) -> str:
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if content.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if content.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        return "webp"
    raise ValueError("the picture is no PNG, JPEG, GIF or WebP")


def _size_in(content: bytes) -> tuple[int, int]:
    match _kind_of(content):
        case "png":
            return _pair(">II", content, 16)
        case "gif":
            return _pair("<HH", content, 6)
        case "jpeg":
            return _size_in_jpeg(content)
    return _size_in_webp(content)


def _size_in_jpeg(content: bytes) -> tuple[int, int]:
    at = 2
    while True:
        while content[at] == content[at + 1] == 0xFF:  # fill bytes
            at += 1
        marker, (length, _) = content[at + 1], _pair(">HH", content, at + 2)
        if marker in _FRAMES:
            height, width = _pair(">HH", content, at + 5)
            return width, height
        if content[at] != 0xFF or length < 2:
            raise ValueError("the picture is a broken JPEG")
        at += 2 + length


def _size_in_webp(content: bytes) -> tuple[int, int]:
    kind = content[12:16]
    if kind == b"VP8X":
        width, high, height, highest = struct.unpack_from("<HBHB", content, 24)
        return (high << 16 | width) + 1, (highest << 16 | height) + 1
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", content, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = _pair("<HH", content, 26)
    return width & 0x3FFF, height & 0x3FFF


def _pair(form: str, content: bytes, at: int) -> tuple[int, int]:
    first, second = struct.unpack_from(form, content, at)
    return first, second
