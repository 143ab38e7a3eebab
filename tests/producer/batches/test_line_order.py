"""Lines of a batch with the same beginning run one after another."""

from __future__ import annotations

import asyncio
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

from promptq.producer.batch_store.input_file import MAX_LINE_BYTES, lines_at
from promptq.producer.batch_store.line_order import lines_by_prefix
from promptq.producer.batches.local_batch import run_batch
from tests.producer.batches.conftest import expected_texts, line, texts_in, write_lines
from tests.support.model_free import running_worker

DOCUMENTS = [f"{name}{'x' * 1500}" for name in "abc"]


def of_document(number: int, document: str) -> dict[str, Any]:
    sound = line(number)
    return sound | {"body": {"seed": number, "max_tokens": 5, "prompt": f"{document} {number}"}}


def test_lines_stand_beside_those_with_the_same_beginning(tmp_path: Path) -> None:
    """Groups stand in the order of their first lines, and short lines at their places."""
    chat = {"custom_id": "chat", "url": "/v1/chat/completions", "body": {"user": '"body"'}}
    chat["body"]["messages"] = [{"role": "user", "content": DOCUMENTS[0]}]
    longer = DOCUMENTS[0] + "y" * 4000
    lines = [
        of_document(0, longer), of_document(1, DOCUMENTS[1]), "  ", of_document(3, DOCUMENTS[0]),
        line(4), of_document(5, DOCUMENTS[1]), of_document(6, longer), chat, "no JSON " * 200,
        {**chat, "custom_id": "other"}, "\"messages\"", of_document(11, DOCUMENTS[0]),
    ]  # fmt: skip
    source = write_lines(tmp_path / "in.jsonl", lines)
    found = [*lines_by_prefix(source)]
    assert [number - 1 for number, _ in found] == [0, 6, 3, 11, 1, 5, 4, 7, 9, 8, 10]
    assert sorted(found) == [(number, raw) for number, _, raw in lines_at(source)]


def test_a_line_that_is_too_long_is_still_one_line(tmp_path: Path) -> None:
    lines = [line(0), "x" * (2 * MAX_LINE_BYTES + 2), line(2)]
    found = [*lines_by_prefix(write_lines(tmp_path / "in.jsonl", [*lines]))]
    assert [(number, len(raw)) for number, raw in found][1] == (2, MAX_LINE_BYTES + 1)
    assert [json.loads(raw)["custom_id"] for _, raw in found[::2]] == ["id-0", "id-2"]


async def test_a_batch_runs_in_this_order(tmp_path: Path, redis_url: str) -> None:
    numbers = random.Random(1).sample(range(12), 12)
    lines = [of_document(number, DOCUMENTS[number % 3]) for number in numbers]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    async with running_worker(redis_url):
        await asyncio.to_thread(run_batch, source, output, server=redis_url, max_in_flight=1)
    assert texts_in(output) == expected_texts(range(12))
    ran = [json.loads(text)["custom_id"] for text in output.read_text().splitlines()]
    documents = [int(custom_id.removeprefix("id-")) % 3 for custom_id in ran]
    assert sum(a != b for a, b in pairwise(documents)) == 2
