"""A client that records what the server has acknowledged. Run the file as a module; the client
stops when its standard input ends.

The client enqueues requests, and reads the stream of each. The history has one JSON line for each
answer. `{"acked": ID, "seed": N}` means that the server acknowledged a request. `{"ended": ID,
"error": NAME}` is the end of its stream. The name is empty if the text was right. `{"refused":
NAME}` is an enqueue that raised this error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from promptq import AsyncClient
from promptq.shared.errors import PromptqError
from tests.support.model_free import text_of

MAX_TOKENS = 20
_NUM_WRITERS = 8
_PAUSE_SECONDS = 0.1


class Writer:
    """Enqueues requests one after another, and meanwhile reads the streams of earlier requests."""

    def __init__(self, client: AsyncClient, name: str, durability: str | None) -> None:
        self._client = client
        self._name = name
        self._durability = durability
        self._readers = set[asyncio.Task[None]]()

    async def write_until(self, stop: asyncio.Event) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                request_id = await self._enqueue(number)
            except PromptqError as error:
                note(refused=type(error).__name__)
            else:
                note(acked=request_id, seed=number)
                reader = asyncio.create_task(self._read(request_id, number))
                self._readers.add(reader)
                reader.add_done_callback(self._readers.discard)
            await asyncio.sleep(_PAUSE_SECONDS)
        if self._readers:
            await asyncio.wait(self._readers)

    async def _enqueue(self, seed: int) -> str:
        return await self._client.enqueue(
            "a",
            seed=seed,
            max_tokens=MAX_TOKENS,
            idempotency_key=f"{self._name}-{seed}",
            durability=self._durability,
        )

    async def _read(self, request_id: str, seed: int) -> None:
        error = ""
        try:
            text = "".join([event.text async for event in self._client.stream(request_id)])
            if text != text_of(seed, MAX_TOKENS):
                error = "another text"
        except PromptqError as raised:
            error = type(raised).__name__
        note(ended=request_id, error=error)


def note(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--durability", help="that of all requests")
    options = parser.parse_args()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, stop.set)
    async with AsyncClient(options.url) as client:
        writers = [
            Writer(client, f"{options.name}-{nth}", options.durability)
            for nth in range(_NUM_WRITERS)
        ]
        await asyncio.gather(*(writer.write_until(stop) for writer in writers))


if __name__ == "__main__":
    asyncio.run(main())
