"""Pictures in messages: their sizes, their limits, and how wrong ones are named."""

from __future__ import annotations

from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import pytest

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.pictures import MAX_PICTURES, MAX_PIXELS, data_url, picture_part
from promptq.shared.protocol.request import Request
from tests.programs.engines.pngs import png

# Of 3 times 2 pixels, by Pillow 13.
SMALL = {
    "gif": "R0lGODdhAwACAIEAAMgKCgAAAAAAAAAAACwAAAAAAwACAAAIBgABCBwYEAA7",
    "webp": "UklGRh4AAABXRUJQVlA4TBEAAAAvAkAAAAdQhSJXof+BiOh/AAA=",
    "webp, lossy": (
        "UklGRjIAAABXRUJQVlA4ICYAAABwAQCdASoDAAIAB0CWJaACdAFAAAD+6DixhNJbd/uD9QfxA2AAAA=="
    ),
    "webp, extended": (
        "UklGRmYAAABXRUJQVlA4WAoAAAAYAAAAAgAAAQAAQUxQSAcAAAAACQkJCQkJAFZQOCAmAAAAcAEAnQEqAwACAAdA"
        "liWgAnQBQAAA/ug4sYTSW3f7g/UH8QNgAABFWElGCgAAAE1NACoAAAAIAAA="
    ),
}
# The first bytes of a JPEG, behind an application's data and tables.
JPEG = (
    b"\xff\xd8\xff\xe0\x00\x04ab"
    + b"\xff\xdb\x00\x03c"
    + b"\xff\xff\xc2\x00\x11\x08\x00\x02\x00\x03"
)


def chat(*urls: Any, text: str = "What is this?") -> dict[str, Any]:
    pictures = [{"type": "image_url", "image_url": url} for url in urls]
    return {"messages": [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}]}


def refusal(*urls: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        Request.build(chat(*urls))
    assert caught.value.field == "messages"
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "header_bytes"),
    [
        *zip(map(b64decode, SMALL.values()), (10, 25, 30, 30), strict=True),
        (JPEG, len(JPEG)),
        (png(1, 3, 2), 24),
    ],
    ids=[*SMALL, "jpeg", "png"],
)
def test_sizes_come_from_headers(content: bytes, header_bytes: int) -> None:
    (picture,) = Request.build(chat({"url": data_url(content), "detail": "low"})).pictures
    assert (picture.width, picture.height) == (3, 2)
    for length in range(header_bytes):
        cut = b64encode(content[:length]).decode()
        assert "picture 0: the picture " in refusal(f"data:image/png;base64,{cut}")


def test_payloads_keep_parts_in_order_and_can_be_read_again() -> None:
    url = data_url(png(1))
    parts: list[Any] = [
        "a",
        {"type": "text", "text": "b"},
        picture_part(url),
        picture_part(url),
        "c",
    ]
    request = Request.build({"messages": [{"role": "user", "content": parts}]})
    text = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    kept = [text[0], picture_part(url), picture_part(url), text[1]]
    assert request.messages == [{"role": "user", "content": kept}]
    again = Request.parse(request.to_payload())
    assert again.messages == request.messages
    assert again.pictures == request.pictures
    assert len(again.pictures) == 2


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (None, "messages[0].content[0]: must be like"),
        ({"url": 5}, "messages[0].content[0]: must be like"),
        ("https://example.com/a.png", "messages[0].content: picture 0: a picture's URL must begin"),
        ("data:image/svg+xml;base64,aaaa", "messages[0].content: picture 0: a picture's URL must"),
        ("data:image/png;base64,a", "messages[0].content: picture 0: the picture is no base64"),
        (
            data_url(png(1, 0, 5)),
            "messages[0].content: picture 0: the picture has 0 times 5 pixels",
        ),
    ],
)
def test_wrong_pictures_are_named(url: Any, said: str) -> None:
    assert refusal(url).startswith(said)


def test_bytes_and_files_become_data_urls(tmp_path: Path) -> None:
    content = png(1)
    file = tmp_path / "a.png"
    file.write_bytes(content)
    pictures = Request.build(chat(content, {"url": content}, file, {"url": file})).pictures
    assert {picture.url for picture in pictures} == {data_url(content)}
    assert len(pictures) == 4
    assert refusal(b"<html>") == "messages[0].content[0]: the picture is no PNG, JPEG, GIF or WebP"
    with pytest.raises(FileNotFoundError):
        Request.build(chat(tmp_path / "missing.png"))


def test_a_url_to_fetch_is_refused_with_a_hint() -> None:
    assert refusal("http://example.com/a.png").endswith(
        "; only the gateway and batches fetch pictures"
    )


def test_a_decompression_bomb_is_refused_by_its_header() -> None:
    side = int(MAX_PIXELS**0.5)
    whole, half = (data_url(png(1, side, rows, num_rows=1)) for rows in (side, side // 2))
    for pictures in ([whole], [half, half]):
        Request.build(chat(*pictures))
    for pictures in ([data_url(png(1, side, side + 1, num_rows=1))], [half, half, half]):
        assert f"more than {MAX_PIXELS} pixels in all" in refusal(*pictures)


def test_the_number_of_pictures_is_limited() -> None:
    small = data_url(png(1, 1, 1))
    Request.build(chat(*[small] * MAX_PICTURES))
    assert f"at most {MAX_PICTURES} pictures" in refusal(*[small] * (MAX_PICTURES + 1))


@pytest.mark.parametrize("name", ["tokenize", "prompt_logprobs"])
def test_fields_that_need_the_tokens_of_pictures_are_refused(name: str) -> None:
    Request.build(chat() | {name: True if name == "tokenize" else 0})
    with pytest.raises(InvalidRequestError, match=f"^messages: .* cannot be combined with {name}"):
        Request.build(chat(data_url(png(1))) | {name: True if name == "tokenize" else 0})
