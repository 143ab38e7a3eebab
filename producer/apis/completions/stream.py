"""The stream of a completion: chunks of all its choices, in the form of OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from promptq.producer.apis.completions.positions import Position, event_id
from promptq.producer.apis.completions.write import ChoiceWriter, is_large, role_chunks, usage_chunk
from promptq.producer.calls.completion import Completion, StreamedCompletion, failure, learned
from promptq.producer.calls.errors import ApiError
from promptq.producer.calls.logprobs import freed
from promptq.producer.calls.queues import ServedQueue
from promptq.producer.http.connection_limits import Unfinished
from promptq.producer.http.stream import Out
from promptq.shared.protocol.events import TokenEvent, Usage

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class CompletionStream(StreamedCompletion):
    """A completion for `EventStream`, from where its client stopped reading."""

    have: Sequence[Position] = ()

    def frames(self, served: ServedQueue, out: Out) -> CompletionFrames:
        have = self.have or [Position()] * self.completion.num_choices
        return CompletionFrames(served, self.completion, have, out)


class CompletionFrames:
    """The frames of a completion: chunks of all its choices, then its usage and the end."""

    def __init__(
        self, served: ServedQueue, completion: Completion, have: Sequence[Position], out: Out
    ) -> None:
        self._served = served
        self._completion = completion
        self._have = have
        self._out = out
        self._learning = asyncio.Lock()
        self._writers: list[ChoiceWriter] = []
        self._positions: list[str] = []
        self._num_tokens = 0

    async def begin(self) -> None:
        """Nothing comes before the first token."""

    def write(self, place: int, event: TokenEvent) -> Unfinished:
        """Write an event of the choice at `place`."""
        if event.finish_reason is not None:
            so_far = self._num_tokens + event.end
            if (error := failure(event.finish_reason, event.error, so_far)) is not None:
                raise error
        self._num_tokens += len(event.token_ids)
        if not self._writers:
            return partial(self._learn_and_write, place, event)
        if is_large(event):
            return partial(self._write_in_turns, place, event)
        return self._write_chunk(place, self._writers[place].chunk(event))

    async def finish(self) -> None:
        if self._completion.include_usage:
            usages = [writer.usage or Usage() for writer in self._writers]
            chunk = usage_chunk(self._completion, usages)
            await self._out.write_all(f"data: {chunk}\n\n".encode("ascii"))
        await self._out.write_all(_DONE)

    def error(self, error: ApiError) -> bytes:
        return f"data: {json.dumps(error.body)}\n\n".encode("ascii")

    async def _write_in_turns(self, place: int, event: TokenEvent) -> None:
        turns = self._served.client.turns
        chunk = await turns.run(self._writers[place].chunk_in_parts(event))
        await turns.run(freed(event))
        if (finish := self._write_chunk(place, chunk)) is not None:
            await finish()

    def _write_chunk(self, place: int, chunk: str | None) -> Unfinished:
        if chunk is None:
            return None
        self._positions[place] = self._writers[place].position
        last_id = event_id(self._completion.id, self._positions)
        return self._out.write(f"id: {last_id}\ndata: {chunk}\n\n".encode("ascii"))

    async def _learn_and_write(self, place: int, event: TokenEvent) -> None:
        async with self._learning:
            if not self._writers:
                self._completion, style = await learned(self._served, self._completion)
                self._writers = [
                    ChoiceWriter(self._completion, index, have, style)
                    for index, have in enumerate(self._have)
                ]
                self._positions = [writer.position for writer in self._writers]
                if roles := role_chunks(self._completion, self._have):
                    # They have no ids: a client that has read nothing else begins anew. They go
                    # out together, as nothing may come between them.
                    frames = "".join(f"data: {chunk}\n\n" for chunk in roles)
                    await self._out.write_all(frames.encode("ascii"))
        await self._write_in_turns(place, event)
