"""A minimal relay between Redis and HTTP clients: `python -m benchmarks.gateway.relay URL`.

One connection brings the events of all streams. The relay passes each event on unchanged, in one
write. The relay does not read missed events, has no API's format and no limits. So its delay of a
token shows what the machine costs, without the gateway. The relay has only the endpoints that
`benchmarks.gateway` uses.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import cast
from urllib.parse import urlsplit

import hiredis
import uvloop

from promptq import AsyncClient
from promptq.shared.queue.request_queue import new_request_id

_MAX_ASKING = 32
_TOKENS = re.compile(rb'"index":(\d+),"token_ids":\[([^\]]*)\]')


class Relay:
    """Passes events of streams on to the clients that wait for them."""

    def __init__(self, client: AsyncClient) -> None:
        self.streams: dict[bytes, asyncio.Transport] = {}
        self._client = client
        self._asking = asyncio.Semaphore(_MAX_ASKING)

    async def begin(self, transport: asyncio.Transport, body: bytes) -> None:
        """Enqueue a client's request, and send the request's events to the client."""
        asked = json.loads(body)
        request_id = f"cmpl-{new_request_id()}"
        self.streams[request_id.encode()] = transport
        transport.write(b"HTTP/1.1 200 OK\r\n\r\n")
        async with self._asking:
            await self._client.enqueue(
                asked["prompt"], max_tokens=asked["max_tokens"], request_id=request_id
            )

    def pass_on(self, request_id: bytes, event: bytes) -> None:
        found = _TOKENS.search(event)
        assert found is not None
        end = int(found[1]) + len(found[2].split(b","))
        frame = b"id: %b/%d-0\ndata: %b\n\n" % (request_id, end, event)
        if b'"finish_reason":null' in event:
            self.streams[request_id].write(frame)
        else:
            transport = self.streams.pop(request_id)
            transport.write(frame + b"data: [DONE]\n\n")
            transport.close()


class _Subscriber(asyncio.Protocol):
    def __init__(self, relay: Relay, password: str) -> None:
        self._relay = relay
        self._password = password
        self._reader = hiredis.Reader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        commands = f"AUTH {self._password}\r\nPSUBSCRIBE promptq:*:events:*\r\n"
        cast(asyncio.Transport, transport).write(commands.encode())

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (message := self._reader.gets()) is not False:
            if message[0] == b"pmessage":
                self._relay.pass_on(message[2].rpartition(b":events:")[2], message[3])


class _Server(asyncio.Protocol):
    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        body = data.partition(b"\r\n\r\n")[2]  # a request comes in one piece
        self._task = asyncio.create_task(self._relay.begin(self._transport, body))


async def serve(url: str) -> None:
    """Serve until the process is ended. Prints the address."""
    loop, host = asyncio.get_running_loop(), urlsplit(url)
    async with AsyncClient(url) as client:
        relay = Relay(client)
        await loop.create_connection(
            lambda: _Subscriber(relay, host.password or ""), host.hostname, host.port
        )
        server = await loop.create_server(lambda: _Server(relay), "127.0.0.1", 0, backlog=4096)
        port = server.sockets[0].getsockname()[1]
        print(f"ready at http://127.0.0.1:{port}, a bare relay", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
