"""Malformed HTTP requests: valid requests for all routes of a gateway, each spoilt in some ways."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from promptq.producer.gateway.app import create_app
from promptq.producer.settings.gateway import GatewaySettings

Route = tuple[str, str]
"""The method and the path of a route."""

_NOT_FOR_ADMINS = "/dashboard/api/pause"
"""A call with an administrator's key would pause the queue and stop the other calls."""

_ODD_TEXTS = [
    "", " ", "\x00", "\x1b]0;x\x07", "\ud800", "\u202e", "a" * 5000, "9" * 5000, "-1", "1e999",
    "NaN", "null", "true", "../../etc/passwd", "%00", "%1b]0;x%07", "%ff", "http://[", "[", "{",
    "'", '"', "\r\n", "file-" + "0" * 32, "chatcmpl-" + "0" * 32, "x/1-1", "9999999999-1e", "١٢٣",
    "١" * 20, "=", ";", ",",
]  # fmt: skip
_ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), [], {}, [[]], [{}], [None], [1] * 2000, ["x"] * 2000,
    [-1] * 2000, {"a": 1}, {str(n): n for n in range(2000)},
]  # fmt: skip
_ODD_HEADERS: dict[str, Sequence[str]] = {
    "Host": ["", "[", "a b", "localhost:99999", "localhost, localhost", "\xff", "localhost:\xb2"],
    "Origin": ["http://[", "null", "http://localhost:1", "://", "http://a b"],
    "Content-Type": [
        "", "text/plain", "application/json; charset=undefined", "multipart/form-data",
        "multipart/form-data; boundary=", "multipart/form-data; boundary=b; charset=punycode",
        "multipart/form-data; boundary=b; charset=utf-7", "application/x-www-form-urlencoded",
        "multipart/form-data; boundary*=undefined''b", "multipart/form-data; boundary=" + "b" * 300,
    ],
    "Content-Length": ["-1", "1e9", "999999999999999999999", "0x10", "1, 1", "+1", "\xb2", ""],
    "Transfer-Encoding": ["chunked", "gzip", "chunked, chunked", "identity", "\x0bchunked"],
    "Last-Event-ID": [
        "", "x", "chatcmpl-x/1-1", "chatcmpl-" + "0" * 32 + "/1-1", "/1-1e.1-1", "\xff",
    ],
    "Accept": [
        "", "*/*;q=x", "application/openmetrics-text;version=x", "a/b;escaping=x", "," * 500,
    ],
    "Accept-Encoding": ["gzip;q=x", ",,,"], "Cookie": ["a=b; c", "=\xff", '"'],
    "Authorization": ["Bearer", "Bearer \xff", "Basic x", "bearer  ", "Bearer " + "x" * 5000],
    "X-Priority": ["1e9", "-", "9" * 30, "\xb2"], "X-Deadline-Ms": ["-1", "0", "9" * 18],
    "X-Detach": ["maybe", "1", "\xff"], "X-Wait-For-Worker": ["0", "2"],
    "Idempotency-Key": ["", "\xff\xfe", "x" * 3000],
    "Range": ["bytes=-", "bytes=9-1", "bytes=0-9,1-2", "x"],
    "If-Range": ["x"], "Expect": ["100-continue", "200-ok"], "Upgrade": ["websocket", "h2c"],
    "Connection": ["upgrade", "keep-alive", "close, close"], "Sec-Fetch-Site": ["cross-site", "x"],
    "Forwarded": ["for=_x"], "X-Forwarded-For": ["x, y", "\xff"],
    "traceparent": ["00-" + "0" * 32, "x"],
    "X-HTTP-Method-Override": ["DELETE"], "X Y": ["a space"], "": ["no name"], "X-Null": ["\x00"],
}  # fmt: skip
_CHARSETS = [
    "utf-8",
    "latin-1",
    "undefined",
    "punycode",
    "utf-7",
    "idna",
    "hex",
    "unicode_escape",
    "x",
]
_ODD_METHODS = [
    "HEAD",
    "OPTIONS",
    "PUT",
    "PATCH",
    "DELETE",
    "TRACE",
    "CONNECT",
    "PROPFIND",
    "GET",
    "POST",
]


@dataclass(slots=True)
class Draft:
    """A request before it is written as bytes."""

    method: str
    path: str
    query: list[tuple[str, str]] = field(default_factory=list)
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    chunks: list[bytes] | None = None


@dataclass(frozen=True, slots=True)
class Thrown:
    """A malformed request, and the ways in which it was spoilt."""

    raw: bytes
    kinds: tuple[str, ...]
    route: Route


def all_routes() -> list[Route]:
    """Returns every route of a gateway, also routes that the gateway's OpenAPI description leaves
    out."""
    app = create_app(GatewaySettings(redis_url="redis://127.0.0.1:1"))
    described = app.openapi()["paths"]
    found = {(method.upper(), path) for path, methods in described.items() for method in methods}
    for route in app.routes:
        found |= {(method, route.path) for method in getattr(route, "methods", None) or ()}
    return sorted(found)


def make_request(
    routes: Sequence[Route], number: int, rng: random.Random, secret: str, admin_secret: str
) -> Thrown:
    """Returns malformed request number `number`. The routes take turns."""
    route = routes[number % len(routes)]
    method, path = route
    draft = Draft(method, re.sub(r"{\w+(:\w+)?}", lambda _: _segment(rng), path))
    key = admin_secret if rng.random() < 0.5 and path != _NOT_FOR_ADMINS else secret
    draft.headers = [("Host", "localhost"), ("Authorization", f"Bearer {key}")]
    if rng.random() < 0.8:
        draft.headers.append(("Connection", "close"))
    is_form = (method, path) == ("POST", "/v1/files")
    if is_form:
        _fill_form(draft, rng)
    elif method == "POST":
        draft.headers.append(("Content-Type", "application/json"))
        draft.body = _json(_fields_of(path))
    if rng.random() < 0.3:
        draft.query = [("limit", "2"), ("after", "x"), ("id", "x"), ("state", "waiting")]
    # The fields of a form are odd enough.
    chosen = rng.sample(_SPOILERS, k=rng.choice([0, 0, 1]) if is_form else rng.randint(1, 3))
    for spoil in chosen:
        spoil(draft, rng)
    raw, kinds = _written(draft), [spoil.__name__.removeprefix("_spoil_") for spoil in chosen]
    if is_form:
        kinds.append("form")
    if rng.random() < 0.2:
        raw = _spoilt_bytes(raw, rng)
        kinds.append("bytes")
    return Thrown(raw, tuple(kinds), route)


def make_upload(number: int, rng: random.Random, secret: str, admin_secret: str) -> Thrown:
    """Returns a malformed upload."""
    return make_request([("POST", "/v1/files")], number, rng, secret, admin_secret)


def _fields_of(path: str) -> dict[str, Any]:
    if path.endswith("/chat/completions"):
        return {
            "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 1,
            "stop": ["x"], "tools": [{"type": "function", "function": {"name": "f"}}],
            "stream": False, "metadata": {"a": "b"}, "n": 1,
        }  # fmt: skip
    if path.endswith(("/completions", "/play")):
        return {
            "prompt": "Hi", "max_tokens": 2, "logit_bias": {"1": 1}, "bad_words": ["x"], "seed": 1,
            "stop_token_ids": [1], "response_format": {"type": "text"}, "stream": True,
            "stream_options": {"include_usage": True}, "priority": 1, "user": "x", "logprobs": 1,
        }  # fmt: skip
    if path == "/v1/batches":
        return {
            "input_file_id": "file-" + "0" * 32, "endpoint": "/v1/completions",
            "completion_window": "24h", "metadata": {"a": "b"},
            "output_expires_after": {"anchor": "created_at", "seconds": 3600},
        }  # fmt: skip
    return {"id": "x", "priority": 1, "ids": ["x"], "all": False}


def _fill_form(draft: Draft, rng: random.Random) -> None:
    parts = {
        "purpose": rng.choice(["batch", "user_data", _text(rng)]),
        "expires_after[anchor]": rng.choice(["created_at", _text(rng)]),
        "expires_after[seconds]": rng.choice(["3600", "9" * 5000, _text(rng)]),
    }
    chosen = rng.sample(sorted(parts), k=rng.randint(0, 3))
    name = rng.choice(["a.jsonl", _text(rng)])
    pieces = [_part(f'name="{it}"', parts[it]) for it in chosen]
    pieces.append(_part(f'name="file"; filename="{name}"', '{"custom_id": "a"}\n' * 3))
    if rng.random() < 0.3:
        pieces *= rng.randint(2, 30)
    rng.shuffle(pieces)
    charset = rng.choice(["", f"; charset={rng.choice(_CHARSETS)}"])
    draft.headers.append(("Content-Type", f"multipart/form-data; boundary=b{charset}"))
    draft.body = b"".join(pieces) + b"--b--\r\n"


def _part(described: str, content: str) -> bytes:
    head = f"--b\r\nContent-Disposition: form-data; {described}\r\n\r\n"
    return f"{head}{content}\r\n".encode("utf-8", "surrogatepass")


def _spoil_header(draft: Draft, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 4)):
        name = rng.choice(sorted(_ODD_HEADERS))
        if rng.random() < 0.5:
            draft.headers = [it for it in draft.headers if it[0] != name]
        value = rng.choice([*_ODD_HEADERS[name], _text(rng)])
        draft.headers.insert(rng.randint(0, len(draft.headers)), (name, value))


def _spoil_query(draft: Draft, rng: random.Random) -> None:
    names = [
        "limit",
        "after",
        "order",
        "purpose",
        "id",
        "state",
        "tenant",
        "prefix",
        "cursor",
        "choices",
    ]
    names += ["n", "echo", "usage", "detach", "name", _text(rng)]
    draft.query += [(rng.choice(names), _text(rng)) for _ in range(rng.randint(1, 5))]


def _spoil_path(draft: Draft, rng: random.Random) -> None:
    at = rng.randint(0, len(draft.path))
    draft.path = draft.path[:at] + _text(rng) + draft.path[at + rng.randint(0, 3) :]


def _spoil_method(draft: Draft, rng: random.Random) -> None:
    draft.method = rng.choice([*_ODD_METHODS, _text(rng)])


def _spoil_body(draft: Draft, rng: random.Random) -> None:
    try:
        fields = json.loads(draft.body)
    except (ValueError, RecursionError):
        draft.body = _spoilt_bytes(draft.body, rng)
        return
    for _ in range(rng.randint(1, 4)):
        fields = _spoilt_json(fields, rng)
    draft.body = _json(fields)
    if rng.random() < 0.2:
        draft.body = _spoilt_bytes(draft.body, rng)


def _spoil_depth(draft: Draft, rng: random.Random) -> None:
    depth = rng.choice([100, 250, 1000, 100_000])
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    inner = opening * depth + b"1" + closing * (depth if rng.random() < 0.8 else 0)
    name = rng.choice([b"messages", b"prompt", b"metadata", b"tools", b"ids", b"response_format"])
    draft.body = inner if rng.random() < 0.3 else b'{"%b":%b}' % (name, inner)


def _spoil_size(draft: Draft, rng: random.Random) -> None:
    piece = rng.choice([b"1,", b"{},", b"-1,", b'"a",', b"[],"])
    name = rng.choice([b"prompt", b"messages", b"stop", b"tools", b"ids", b"bad_words", b"x"])
    draft.body = b'{"%b":[%b1]}' % (name, piece * rng.choice([1000, 20_000, 200_000]))


def _spoil_chunks(draft: Draft, rng: random.Random) -> None:
    body, draft.chunks = draft.body or b"{}", []
    while body:
        size = rng.randint(1, max(1, len(body)))
        told = size if rng.random() < 0.9 else rng.choice([0, size + 1, 2**40, 2**64])
        extension = rng.choice([b"", b"", b";a=b", b";" + b"x" * 1000])
        draft.chunks.append(b"%x%b\r\n%b\r\n" % (told, extension, body[:size]))
        body = body[size:]
    trailer = rng.choice([b"", b"X-Priority: 1\r\n", b"x\r\n", b"Content-Length: 1\r\n"])
    draft.chunks.append(b"0\r\n" + trailer + b"\r\n")


def _spoil_ahead(draft: Draft, rng: random.Random) -> None:
    """Adds further requests, or something else, after the body."""
    more = rng.choice(
        [b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\r\n\r\n", b"x" * 100]
    )
    draft.chunks = None
    draft.headers.append(("Content-Length", str(len(draft.body))))
    draft.body += more * rng.choice([1, 5, 50])


_SPOILERS: list[Callable[[Draft, random.Random], None]] = [
    _spoil_header, _spoil_query, _spoil_path, _spoil_method, _spoil_body, _spoil_body, _spoil_depth,
    _spoil_size, _spoil_chunks, _spoil_ahead, _spoil_header,
]  # fmt: skip
KINDS = frozenset({it.__name__.removeprefix("_spoil_") for it in _SPOILERS} | {"bytes", "form"})


def _spoilt_json(value: Any, rng: random.Random) -> Any:
    """Returns the value with one part replaced, added or removed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        match rng.randrange(4):
            case 0:
                return {it: value[it] for it in value if it != name}
            case 1:
                return {**value, _text(rng): rng.choice(_ODD_VALUES)}
        return {**value, name: _spoilt_json(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return [*value[:at], _spoilt_json(value[at], rng), *value[at + 1 :]]
    return rng.choice([*_ODD_VALUES, _text(rng)])


def _spoilt_bytes(raw: bytes, rng: random.Random) -> bytes:
    spoilt = bytearray(raw)
    for _ in range(rng.randint(1, 8)):
        at = rng.randint(0, len(spoilt))
        match rng.randrange(4):
            case 0:
                spoilt[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del spoilt[at : at + rng.randint(1, 20)]
            case 2:
                spoilt[at:at] = rng.randbytes(rng.randint(1, 20))
            case 3:
                spoilt[at:at] = spoilt[max(0, at - 50) : at]
    return bytes(spoilt)


def _segment(rng: random.Random) -> str:
    return rng.choice(
        ["x", "file-" + "0" * 32, "chatcmpl-" + "0" * 32, "cmpl-" + "1" * 32, _text(rng)]
    )


def _text(rng: random.Random) -> str:
    if rng.random() < 0.7:
        return rng.choice(_ODD_TEXTS)
    return "".join(chr(rng.choice([rng.randrange(128), rng.randrange(0x3000)])) for _ in range(9))


def _json(fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _written(draft: Draft) -> bytes:
    query = "&".join(f"{name}={value}" for name, value in draft.query)
    target = f"{draft.path}?{query}" if query else draft.path
    headers, body = list(draft.headers), draft.body
    given = {name.lower() for name, _ in headers}
    if draft.chunks is not None:
        headers.append(("Transfer-Encoding", "chunked"))
        body = b"".join(draft.chunks)
    elif body and "content-length" not in given:
        headers.append(("Content-Length", str(len(body))))
    lines = [f"{draft.method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    head = "\r\n".join(lines) + "\r\n\r\n"
    return head.encode("utf-8", "surrogatepass") + body
