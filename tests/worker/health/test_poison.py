"""One request that kills whoever runs it, among innocents: real processes that really die."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import redis

from promptq import Client
from promptq.shared.protocol.request import NewRequest, Request, RequestState
from promptq.shared.queue.request_queue import RequestQueue, new_request_id
from tests.faults.worker.faulty_worker import EXIT_CODE
from tests.support.model_free import text_of
from tests.support.paths import ROOT
from tests.support.processes import start
from tests.support.requests import result_of
from tests.support.roles import as_role

NUM_WORKERS = 2


class Supervisor:
    """Keeps worker processes running, and counts how many died."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.num_deaths = 0
        self.processes = [self._start() for _ in range(NUM_WORKERS)]

    def look_after(self) -> None:
        for n, process in enumerate(self.processes):
            if process.poll() is not None:
                assert process.returncode == EXIT_CODE, "it died of something else"
                self.num_deaths += 1
                self.processes[n] = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        faulty = [sys.executable, "-m", "tests.faults.worker.faulty_worker", "--redis", self.url]
        options = ["--lease-ms", "2000", "--max-num-seqs", "64"]
        return start(*faulty, *options, cwd=ROOT, env={**os.environ, "FAULT": "dies"})


@pytest.fixture
def supervisor(redis_url: str) -> Iterator[Supervisor]:
    supervisor = Supervisor(as_role("worker", redis_url))
    yield supervisor
    for process in supervisor.processes:
        process.kill()
        process.wait()


def test_one_poison_among_63_innocents(redis_url: str, supervisor: Supervisor) -> None:
    """The poison request dies alone, after two crashes with others; all others get the right
    tokens.
    """
    with redis.Redis.from_url(redis_url) as client:
        queue = RequestQueue(client)
        prompts = ["innocent"] * 64
        prompts[20] = "poison!"
        new = [
            NewRequest(
                new_request_id(),
                Request.build({"prompt": prompt, "seed": n, "max_tokens": 20 + n}),
            )
            for n, prompt in enumerate(prompts)
        ]
        request_ids = queue.enqueue(new)
        poison = request_ids.pop(20)
        waiting = {poison, *request_ids}
        while waiting:
            supervisor.look_after()
            states = {it: queue.state(it) for it in waiting}
            waiting = {it for it, state in states.items() if state and not state.is_final}
            time.sleep(0.01)
        for process in supervisor.processes:
            process.poll()
        supervisor.look_after()

        assert queue.state(poison) is RequestState.DEAD
        seeds = [n for n in range(64) if n != 20]
        for request_id, seed in zip(request_ids, seeds, strict=True):
            assert queue.state(request_id) is RequestState.COMPLETED
            assert result_of(queue, request_id)["text"] == text_of(seed, 20 + seed)
        assert supervisor.num_deaths == 3

    with Client(redis_url) as producer:
        letter = producer.dead_letter(poison)
    assert [attempt.how for attempt in letter.history] == ["crashed", "crashed", "crashed alone"]
    assert len({attempt.worker for attempt in letter.history}) == 3, "each a process of its own"
    assert letter.crashes == 3
