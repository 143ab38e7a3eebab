"""An attacker beside a gateway's load. `benchmarks.gateway` starts it as a separate process.

With its API key it sends the worst bodies that are allowed, some of them slowly, again and again
until it is ended. This is no flood: for each kind of body there is one connection at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import Counter

_MOST_BODY_BYTES = 8 * 1024 * 1024
_SLOW_SECONDS = 1.0

WRONG_TOKENS = b'{"prompt":[0' + b",-1" * 1_000_000 + b"]}"
WRONG_MESSAGES = b'{"messages":[1' + b",1" * 1_500_000 + b"]}"
MANY_TOKENS = b'{"max_tokens":1,"prompt":[0' + b",1" * 4_000_000 + b"]}"
MANY_MESSAGES = b'{"max_tokens":1,"messages":[{"role":"user"}' + b',{"role":"a"}' * 300_000 + b"]}"
MANY_CHOICES = b'{"max_tokens":1,"n":256,"prompt":"%b"}' % (b"x" * 60_000)
LONG_TEXT = b'{"max_tokens":1,"prompt":"%b"}' % (b"x" * (_MOST_BODY_BYTES - 100))


async def _repeat(port: int, path: str, secret: str, body: bytes, answers: Counter[str]) -> None:
    key = f"Authorization: Bearer {secret}\r\n" if secret else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{key}Connection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(head.encode() + body)
                await writer.drain()
                answers[(await reader.read())[9:12].decode()] += 1
            finally:
                writer.close()
        except OSError:
            answers["none"] += 1


async def _drip(port: int, secret: str) -> None:
    """Sends a body byte by byte with pauses, on one connection after the other."""
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {secret}\r\nContent-Length: {_MOST_BODY_BYTES}\r\n\r\n"
    )
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head.encode())
            while not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(_SLOW_SECONDS)
        except OSError:
            await asyncio.sleep(_SLOW_SECONDS)


async def attack(port: int, secret: str) -> None:
    """Attacks until the process is ended."""
    answers: Counter[str] = Counter()
    chats, texts = "/v1/chat/completions", "/v1/completions"
    async with asyncio.TaskGroup() as tasks:
        for path, body in (
            (texts, WRONG_TOKENS),
            (chats, WRONG_MESSAGES),
            (texts, MANY_TOKENS),
            (chats, MANY_MESSAGES),
            (texts, MANY_CHOICES),
            (texts, LONG_TEXT),
        ):
            tasks.create_task(_repeat(port, path, secret, body, answers))
        tasks.create_task(_repeat(port, "/v1/batches", "", LONG_TEXT, answers))
        for _ in range(8):
            tasks.create_task(_drip(port, secret))
        print("ready", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--secret", required=True)
    options = parser.parse_args()
    # A real attacker has another machine, so all other processes here have priority.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    asyncio.run(attack(options.port, options.secret))


if __name__ == "__main__":
    main()
