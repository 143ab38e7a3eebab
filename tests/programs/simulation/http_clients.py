"""Clients of gateways: each reads a stream over HTTP, leaves, loses connections, and resumes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.programs.chaos.audit.auditor import Snapshot
from tests.programs.chaos.audit.records import Kind, Sent
from tests.programs.simulation.loop import Process

_PORT = 8000
_AGAIN_SECONDS = 0.05
_LEAVERS = 0.3
"""Share of streams from which the client departs once, in the middle."""
_TRY_AGAIN = {"queue_unavailable", "gateway_stopping", "no_worker", "body_not_read"}
"""Codes of errors after which a client tries again."""


class LostError(Exception):
    """Raised if the connection ends before the answer, or if the gateway cannot answer yet."""


@dataclass(slots=True)
class HttpStream:
    """All that a client has read of one answer, over any number of connections."""

    request: Sent
    detach: bool
    leaves: bool
    """Whether the client departs in the middle: for ever, or if it is detached, for a while."""
    text: str = ""
    num_tokens: int = 0
    """Number of tokens by the id of the last event."""
    last_event_id: str = ""
    url: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    usages: list[int] = field(default_factory=list)
    """Numbers of completion tokens, one for each report of the usage."""
    num_done: int = 0
    """Number of `[DONE]` frames."""
    code: str = ""
    """The error that ended it."""
    wrong: list[str] = field(default_factory=list)
    """Frames that break the rules of a stream."""
    left_at: float | None = None
    """The world's time at which the client departed for ever."""

    @property
    def is_over(self) -> bool:
        return bool(self.num_done or self.code)

    def read(self, frame: bytes) -> None:
        """Add one server-sent event, and check its place in the stream."""
        lines = [line for line in frame.decode().split("\n") if not line.startswith(":")]
        fields = dict(line.split(": ", 1) for line in lines if line)
        if not fields:
            return
        if self.is_over:
            self.wrong.append(f"{frame[:80]!r} follows the end")
        if fields["data"] == "[DONE]":
            self.num_done += 1
            return
        chunk = json.loads(fields["data"])
        if "error" in chunk:
            self.fail(chunk["error"]["code"])
            return
        if chunk.get("usage"):
            self.usages.append(chunk["usage"]["completion_tokens"])
        for choice in chunk["choices"]:
            self.text += choice["text"]
            if choice["finish_reason"]:
                self.finish_reasons.append(choice["finish_reason"])
        if "id" in fields:
            self._move_to(fields["id"])

    def fail(self, code: str) -> None:
        """Ends the stream with an error. Raises LostError if the client should try again."""
        if code in _TRY_AGAIN:
            raise LostError(code)
        self.code = code

    def _move_to(self, event_id: str) -> None:
        num_tokens, num_chars = map(int, event_id.rpartition("/")[2].rstrip("e").split("-"))
        if num_chars != len(self.text):
            self.wrong.append(f"event {event_id} follows {len(self.text)} characters")
        if num_tokens < self.num_tokens:
            self.wrong.append(f"event {event_id} follows {self.num_tokens} tokens")
        self.num_tokens, self.last_event_id = num_tokens, event_id


def plan_stream(request: Sent, rng: random.Random, is_calm: bool) -> HttpStream:
    """Returns a client's plan: whether the client leaves, and whether its request is detached.
    Changes the kind of the request to the end that this plan leads to.

    A gateway cancels a request whose client departs, unless the request is detached. In a world
    with faults, connections also end against the client's will.
    """
    detach, leaves = rng.random() < 0.5, rng.random() < _LEAVERS
    request.delay_ms = 0
    request.fields["idempotency_key"] = f"key-{request.request_id}"
    if request.kind is not Kind.DEADLINE or not detach:
        request.fields.pop("deadline_ms", None)
        is_safe = detach or (is_calm and not leaves)
        request.kind = Kind.PLAIN if is_safe else Kind.CANCEL
    return HttpStream(request, detach, leaves)


def find_ids(streams: Iterable[HttpStream], snapshot: Snapshot) -> None:
    """Store the ids of requests whose clients got only an error, because the error names no id."""
    ids: dict[int, list[str]] = {}
    for request_id, record in snapshot.requests.items():
        ids.setdefault(json.loads(record["payload"])["seed"], []).append(request_id)
    for stream in streams:
        request = stream.request
        if not request.answers:
            request.answers = ids.get(request.fields["seed"], [])
            request.request_id = [*request.answers, request.request_id][0]


class HttpClientProgram:
    """HTTP clients of gateways in one simulated process. After a restart, the new process continues
    the unfinished streams."""

    def __init__(
        self,
        process: Process,
        rng: random.Random,
        *,
        streams: Sequence[HttpStream],
        hosts: Sequence[str],
        seconds: float,
    ) -> None:
        self.process = process
        self._rng = rng
        self._streams = streams
        self._hosts = hosts
        self.main = process.start(self._run(seconds))

    def drain(self) -> None:
        """Does nothing: a client ends when its requests have ended."""

    async def _run(self, seconds: float) -> None:
        serving = []
        for stream in self._streams:
            if not stream.is_over and stream.left_at is None:
                serving.append(asyncio.create_task(self._serve(stream)))
                await asyncio.sleep(2 * seconds * self._rng.random() / len(self._streams))
        await asyncio.gather(*serving)

    async def _serve(self, stream: HttpStream) -> None:
        while not stream.is_over:
            patience = self._rng.expovariate(5) if stream.leaves else None
            try:
                async with asyncio.timeout(patience):
                    await self._read(stream)
            except TimeoutError:
                self.process.loop.tell(self.process, f"leaves {stream.request.request_id}")
                stream.leaves = not stream.request.answers  # it calls again to learn the id
                if stream.request.answers and not stream.detach:
                    stream.left_at = self.process.loop.now
                    return
            except (LostError, OSError, EOFError) as error:
                self.process.loop.tell(self.process, f"loses an answer: {error!r}")
            if not stream.is_over:
                await asyncio.sleep(_AGAIN_SECONDS + 0.5 * self._rng.random() ** 3)

    async def _read(self, stream: HttpStream) -> None:
        """Makes one call, and reads its answer until it is over or the connection is lost."""
        head = {"Host": "localhost", "Connection": "close"}
        if stream.last_event_id:
            head["Last-Event-ID"] = stream.last_event_id
        body, first_line = b"", f"GET {stream.url} HTTP/1.1"
        if not stream.url or self._rng.random() < 0.5:
            fields = {**stream.request.fields, "stream": True, "detach": stream.detach}
            fields["stream_options"] = {"include_usage": True}
            body, first_line = json.dumps(fields).encode(), "POST /v1/completions HTTP/1.1"
            head["Content-Length"] = str(len(body))
        lines = [first_line, *(f"{name}: {value}" for name, value in head.items()), "", ""]
        async with _connected(self._rng.choice(self._hosts)) as (reader, writer):
            writer.write("\r\n".join(lines).encode() + body)
            status, headers = await _read_head(reader)
            if status != 200:
                stream.fail(_code_in(await reader.read()))
                return
            if headers["x-request-id"] not in stream.request.answers:
                stream.request.answers.append(headers["x-request-id"])
            stream.request.request_id = stream.request.answers[0]
            stream.url = headers["x-stream-url"]
            async for frame in _frames(reader):
                stream.read(frame)
                read = f"{stream.last_event_id or stream.url} {stream.text!r}"
                self.process.loop.tell(self.process, f"has read {read}")
        if not stream.is_over:
            raise LostError("the body is over")


@asynccontextmanager
async def _connected(host: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(host, _PORT)
    try:
        yield reader, writer
    finally:
        writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = (line.split(": ", 1) for line in lines if line)
    return int(first.split()[1]), {name.lower(): value for name, value in headers}


def _code_in(body: bytes) -> str:
    """Returns the code of an error. Raises LostError for a part of a body."""
    try:
        code: str = json.loads(body)["error"]["code"]
        return code
    except ValueError:
        if body == b"Internal Server Error":
            return body.decode()
        raise LostError("a part of an error") from None


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yields the server-sent events of a chunked body."""
    unread = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        unread += (await reader.readexactly(size + 2))[:-2]
        *frames, unread = unread.split(b"\n\n")
        for frame in frames:
            yield frame
