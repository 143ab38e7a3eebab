"""Reads calls and makes their payloads. Other processes read large bodies.

Reading, checking and writing megabytes of JSON takes hundreds of milliseconds. A thread would hold
the interpreter's lock for that time, and all streams would stop. Another process has its own lock,
can be killed, and has limited memory. (`{}`, two characters of JSON, uses 72 bytes.)
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

from promptq.producer.calls.call import CompletionCall, Extra
from promptq.producer.calls.call_body import HEADERS, Body, HistoryNeededError, body_of
from promptq.producer.calls.call_to_payloads import Prepared, prepare
from promptq.producer.calls.caller import Caller
from promptq.producer.calls.completion import shown_fields
from promptq.producer.calls.errors import ApiError
from promptq.producer.calls.output_lengths import features_of
from promptq.producer.calls.picture_urls import PicturesNeededError
from promptq.producer.calls.rate_costs import account_of
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.request import NewRequest, TokenAccount, TraceContext
from promptq.shared.protocol.request import Request as PayloadRequest
from promptq.shared.queue.scripts import Rate

_SMALL_BYTES = 65_536
"""The most bytes of a body or payload that this process reads itself (a few ms at worst)."""
_PIECE_BYTES = 65_536
_NUM_PROCESSES = 2
_MOST_CPU_SECONDS = 30.0
_MOST_SECONDS = 120.0
"""The most seconds that a process may take for a call. Then the call gets status 503."""
LENGTH_BYTES = 4
"""A message between processes begins with its header's length, a number of this many bytes."""
OUT_OF_MEMORY = 3
"""Exit code of a process that has run out of memory."""
_TOO_MUCH_CODES = (OUT_OF_MEMORY, -signal.SIGPROF, -signal.SIGABRT)
"""Exit codes of a process that reached a limit of memory or CPU time. Native code aborts when it
gets no memory."""
_INHERITED = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
"""Environment variables that a new process inherits, to find the interpreter and this package.
Other variables may hold passwords."""

Endpoint = Literal[
    "completions",
    "chats",
    "embeddings",
    "reranks",
    "scores",
    "responses",
    "input_counts",
    "messages",
    "message_forks",
    "counts",
    "quotes",
]
"""The kinds of calls. `counts` (/v1/messages) and `input_counts` (/v1/responses) count tokens."""

Payload = bytes | memoryview
"""A request's payload as JSON. Large payloads are `memoryview`s."""

Parts = list[list[bytes]]
"""The parts of a message: either a body and perhaps its history, or payloads. Each part is a list
of pieces."""


Read = Callable[[Body, Mapping[str, str], str, bytes | None], CompletionCall]
"""A function that parses a call from its body, headers, new id and history. The history has the
items of earlier responses; it is None if these were not read yet.

Raises InvalidRequestError, HistoryNeededError.
"""


class Reader(NamedTuple):
    """The functions that read the calls of one endpoint."""

    read: Read
    new_id: Callable[[], str]
    unpack: Callable[[dict[str, Any], Sequence[Payload]], Extra] | None = None
    """Returns the `extra` of a call from the values that `Extra.pack` has returned."""


Readers = Mapping[Endpoint, Reader]


@dataclass(frozen=True, slots=True)
class _Reading:
    endpoint: Endpoint
    reader: Reader
    headers: Mapping[str, str]
    caller: Caller
    new_id: str
    aliases: Mapping[str, str]
    pictures: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The bytes of fetched pictures."""
        return sum(map(len, self.pictures.values()))


class CallReader:
    """Reads the calls of one gateway. Other processes read the large calls.

    These processes start when they are needed, and write to the gateway's log. Of the large bodies
    of one tenant, only one is read at a time. `needs_features()` returns whether `Prepared` must
    have the features of a large call's requests.
    """

    def __init__(
        self,
        readers: Readers,
        log_level: str,
        log_format: str,
        needs_features: Callable[[], bool],
    ) -> None:
        self._readers = readers
        self._needs_features = needs_features
        self._log_options = log_level, log_format
        self._idle: list[Process] = []
        self._turns = asyncio.Semaphore(_NUM_PROCESSES)
        self._turns_of_tenants: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def prepare(
        self,
        endpoint: Endpoint,
        body: list[bytes],
        headers: Mapping[str, str],
        caller: Caller,
        aliases: Mapping[str, str],
        fetch: Callable[[Sequence[str], str], Awaitable[Mapping[str, str]]] | None = None,
        history_of: Callable[[str], Awaitable[bytes]] | None = None,
    ) -> Prepared:
        """Reads a call whose body is a list of pieces, and builds its payloads.

        `aliases` maps aliases to names of models. `fetch(urls, field)` maps the URLs of a field's
        pictures to data URLs. `history_of(id)` returns the items of the response with this id and
        of all responses before it, one on each line. Raises InvalidRequestError, ApiError, and the
        errors of `fetch` and `history_of`.
        """
        reader = self._readers[endpoint]
        reading = _Reading(endpoint, reader, headers, caller, reader.new_id(), aliases)
        history = None
        while True:  # at most once for each kind of need
            try:
                return await self._read(reading, body, history)
            except HistoryNeededError as needed:
                assert history_of is not None
                history = await history_of(needed.previous_response_id)
            except PicturesNeededError as needed:
                assert fetch is not None
                reading = replace(reading, pictures=await fetch(needed.urls, needed.field))

    async def shown_fields(
        self, caller: Caller, payloads: Sequence[bytes], with_prompts: bool
    ) -> list[dict[str, Any]]:
        """Returns, for each stored payload, the fields that a stream needs (see
        `completion.shown_fields`). Parses large payloads in another process. Raises
        InvalidRequestError, ApiError."""
        if sum(map(len, payloads)) <= _SMALL_BYTES:
            return [shown_fields(payload, with_prompts) for payload in payloads]
        query = {"with_prompts": with_prompts}
        reply, _ = await self._reply_to(query, [[payload] for payload in payloads], caller)
        found: list[dict[str, Any]] = reply["shown"]
        return found

    async def aclose(self) -> None:
        while self._idle:
            await _end(self._idle.pop())

    async def _read(self, reading: _Reading, body: list[bytes], history: bytes | None) -> Prepared:
        """Reads a call, in another process if the call is large. Raises HistoryNeededError if the
        call needs a history and `history` is None. Raises PicturesNeededError."""
        if sum(map(len, body)) + len(history or b"") + reading.num_bytes <= _SMALL_BYTES:
            whole = body_of(b"".join(body))
            call = reading.reader.read(whole, reading.headers, reading.new_id, history)
            if call.num_bytes <= _SMALL_BYTES:
                return prepare(
                    call, reading.caller, reading.new_id, reading.aliases, reading.pictures
                )
        caller = reading.caller
        query = {
            "endpoint": reading.endpoint,
            "headers": {
                name: reading.headers[name] for name in HEADERS.values() if name in reading.headers
            },
            "caller": caller.model_dump(mode="json"),
            "new_id": reading.new_id,
            "aliases": dict(reading.aliases),
            "pictures": dict(reading.pictures),
            "with_features": self._needs_features(),
        }
        parts = [body] if history is None else [body, [history]]
        reply, payloads = await self._reply_to(query, parts, caller)
        if "previous_response_id" in reply:
            raise HistoryNeededError(reply["previous_response_id"])
        if "urls" in reply:
            raise PicturesNeededError(reply["urls"], reply["field"])
        return _prepared_of(reading.reader, reply, payloads, account_of(caller, caller.name))

    async def _reply_to(
        self, query: Mapping[str, Any], parts: Parts, caller: Caller
    ) -> tuple[dict[str, Any], list[Payload]]:
        """Sends a query to a process and returns the reply. First waits until no other large body
        of the caller's tenant is being read. Raises the error in the reply, or ApiError 503."""
        query = {**query, "cpu_seconds": _MOST_CPU_SECONDS}
        tenants_turn = self._turns_of_tenants.setdefault(caller.party, asyncio.Lock())
        try:
            async with tenants_turn, self._turns, asyncio.timeout(_MOST_SECONDS):
                try:
                    reply, payloads = await self._ask_one(query, parts)
                except (EOFError, OSError):
                    reply, payloads = await self._ask_one(query, parts, is_new=True)
        except (EOFError, OSError, TimeoutError):
            raise ApiError(
                503,
                "the gateway could not read the body, because its machine is short of time or"
                " memory, or a process was killed; try again soon",
                code="body_not_read",
                headers={"Retry-After": "5"},
            ) from None
        if "error" in reply:
            raise _error_of(reply["error"])
        return reply, payloads

    async def _ask_one(
        self, query: Mapping[str, Any], parts: Parts, *, is_new: bool = False
    ) -> tuple[dict[str, Any], list[Payload]]:
        """Sends a query to an idle process or a new one, and returns the reply. Raises ApiError 400
        if the process ends at a limit. Raises EOFError or OSError if the process ends for another
        reason."""
        is_new = is_new or not self._idle
        process = await _start(self._log_options) if is_new else self._idle.pop()
        try:
            answered = await _ask(process, query, parts)
        except (EOFError, OSError):  # the process has ended, or is about to
            if await process.wait() in _TOO_MUCH_CODES:
                raise ApiError(
                    400,
                    "the body takes too much time or memory to read; send fewer or shorter lists"
                    " and objects",
                    code="body_too_complex",
                ) from None
            raise
        except BaseException:
            with suppress(ProcessLookupError):
                process.kill()
            raise
        self._idle.append(process)
        return answered


def answer(
    readers: Readers, query: Mapping[str, Any], parts: Sequence[bytes]
) -> tuple[dict[str, Any], list[bytes]]:
    """Returns the reply to a query of a `CallReader`. Runs in a process that the reader started.

    There are two kinds of query. One reads a call: `parts` is the call's body, and perhaps the
    history of its conversation. The reply is a header and a list of bytes: the payloads of the
    new requests, the URLs of their pictures, and the parts of `Prepared.extra`. The other shows
    payloads from the queue, which are the `parts`; its reply is only a header with their fields.
    If a query fails, the reply is only a header with the error.
    """
    try:
        if "endpoint" not in query:
            with_prompts = query["with_prompts"]
            return {"shown": [shown_fields(payload, with_prompts) for payload in parts]}, []
        caller, new_id = Caller.model_validate(query["caller"]), query["new_id"]
        body, history = parts[0], parts[1] if len(parts) > 1 else None
        call = readers[query["endpoint"]].read(body_of(body), query["headers"], new_id, history)
        prepared = prepare(call, caller, new_id, query["aliases"], query["pictures"])
    except HistoryNeededError as needed:
        return {"previous_response_id": needed.previous_response_id}, []
    except PicturesNeededError as needed:
        return {"urls": needed.urls, "field": needed.field}, []
    except InvalidRequestError as error:
        return {"error": {"message": str(error), "field": error.field}}, []
    except ApiError as error:
        details: dict[str, Any] = {"message": str(error), "status": error.status}
        details |= {"param": error.param, "code": error.code, "unsupported": error.unsupported}
        return {"error": details}, []
    new, payloads, pictures = [], [], dict[str, Any]()
    for item in prepared.new:
        included = {"priority", "deadline_ms", "completion_window", "deadline_policy"}
        included |= {"expected_tokens", "idempotency_key", "tenant", "trace_context"}
        fields = item.request.model_dump(include=included)
        options = {"durability": item.durability, "affinity": item.affinity}
        new.append([item.request_id, fields, item.delay_ms, options, [*item.pictures]])
        bare = replace(item, request=item.request.model_copy(update={"trace_context": None}))
        payload = bare.to_payload()
        payloads.append(payload.encode() if isinstance(payload, str) else bytes(payload))
        pictures |= item.pictures
    payloads += [url.encode() for url in pictures.values()]
    reply = {
        "pictures": [*pictures],
        "call": asdict(prepared.call),
        "new": new,
        "features": [
            features_of(item.request) if query["with_features"] else [] for item in prepared.new
        ],
        "rates": [asdict(rate) for rate in prepared.rates],
        "id": prepared.completion_id,
    }
    if prepared.extra is not None:
        reply["extra"], parts = prepared.extra.pack()
        payloads += parts
    return reply, payloads


def head(fields: Mapping[str, Any], sizes: list[int]) -> bytes:
    """Returns the first bytes of a message between the processes: the length of the header, and the
    header with these fields and the sizes of the parts that follow."""
    header = json.dumps({**fields, "sizes": sizes}).encode()
    return len(header).to_bytes(LENGTH_BYTES, "big") + header


def _prepared_of(
    reader: Reader, reply: Mapping[str, Any], parts: list[Payload], account: TokenAccount | None
) -> Prepared:
    rest = iter(parts)
    payloads = [*islice(rest, len(reply["new"]))]
    urls = dict(zip(reply["pictures"], rest, strict=False))
    new = [
        NewRequest(
            item_id,
            _partial_request(fields),
            delay_ms,
            account,
            payload,
            pictures={name: urls[name] for name in names},
            **options,
        )
        for (item_id, fields, delay_ms, options, names), payload in zip(
            reply["new"], payloads, strict=True
        )
    ]
    rates = [Rate(**rate) for rate in reply["rates"]]
    extra = None
    if "extra" in reply:
        assert reader.unpack is not None
        extra = reader.unpack(reply["extra"], [*rest])
    call = CompletionCall(**reply["call"])
    return Prepared(call, new, rates, reply["id"], extra, reply["features"])


def _partial_request(fields: dict[str, Any]) -> PayloadRequest:
    """Returns a request with only the fields that enqueueing needs, without checking them again."""
    context = fields.pop("trace_context")
    if context is not None:
        context = TraceContext.model_construct(**context)
    return PayloadRequest.model_construct(**fields, trace_context=context)


def _error_of(details: dict[str, Any]) -> Exception:
    if "field" in details:
        return InvalidRequestError(details["message"], field=details["field"])
    message, status = details.pop("message"), details.pop("status")
    return ApiError(status, message, **details)


async def _start(arguments: Sequence[str]) -> Process:
    """Starts a process, which imports no files of the working directory. Raises OSError."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "promptq.producer.apis.call_reader_process",
        *arguments,
        stdin=PIPE,
        stdout=PIPE,
        env={name: os.environ[name] for name in _INHERITED if name in os.environ},
    )


async def _ask(
    process: Process, query: Mapping[str, Any], parts: Parts
) -> tuple[dict[str, Any], list[Payload]]:
    """Sends a query and returns the reply. Raises EOFError or OSError if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(head(query, [sum(map(len, part)) for part in parts]))
    for piece in chain.from_iterable(parts):
        process.stdin.write(piece)
        await process.stdin.drain()
    length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
    reply = json.loads(await process.stdout.readexactly(length))
    return reply, [await _read(process.stdout, size) for size in reply.pop("sizes")]


async def _read(stream: asyncio.StreamReader, size: int) -> Payload:
    """Reads `size` bytes in pieces; `readexactly` would copy all at once. Raises EOFError."""
    if size <= _SMALL_BYTES:
        return await stream.readexactly(size)
    buffer, length = memoryview(bytearray(size)), 0
    while length < size:
        piece = await stream.read(min(size - length, _PIECE_BYTES))
        if not piece:
            raise EOFError
        buffer[length : length + len(piece)] = piece
        length += len(piece)
    return buffer


async def _end(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
