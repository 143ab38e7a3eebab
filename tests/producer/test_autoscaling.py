"""How many workers a queue should have: measured by the server, decided by the client."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from promptq import Client
from promptq.producer.admin.autoscaling import Reason, Scaling
from promptq.shared.errors import ConfigurationError, QueueFullError
from promptq.shared.protocol.claims import Room
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import scripts, statistics
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.requests import new
from tests.support.roles import QueueClient, as_role

KEYS = Keys()
TOKENS = 50
"""Of each simulated answer."""
RATE = 100.0
"""Tokens that a simulated worker makes in a second."""
SLOTS = 8
SAMPLE = 5
READING = 15
"""Seconds between two readings of whoever scales."""
START_SECONDS = 12


@pytest.fixture
def connection(redis_url: str) -> Iterator[Any]:
    with QueueClient.from_url(as_role("", redis_url)) as connection:
        yield connection


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with Client(redis_url) as client:
        yield client


@dataclass
class VirtualWorkers:
    """Workers as a fluid, second by second. What they leave in the queue's keys is laid down as if
    it had just happened, so that the scripts themselves measure it."""

    connection: Any
    now: int = 0
    workers: int = 1
    starting: list[int] = field(default_factory=list)
    """When those that were asked for are there."""
    backlog: float = 0.0
    """Requests that wait or run."""
    made: float = 0.0
    """Tokens since the last sample."""
    begun: dict[str, float] = field(default_factory=dict)
    """Counts at the beginning of the open sample."""
    samples: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    worker_rate: float = 0.0
    readings: list[Scaling] = field(default_factory=list)

    @property
    def waiting(self) -> int:
        return max(0, round(self.backlog) - SLOTS * self.workers)

    def second(self, requests: float) -> None:
        if self.now % SAMPLE == 0:
            self._sample()
        self.workers += sum(at == self.now for at in self.starting)
        self.starting = [at for at in self.starting if at > self.now]
        self.backlog += requests
        done = min(self.backlog, self.workers * RATE / TOKENS)
        self.backlog -= done
        self.made += done * TOKENS
        self.now += 1

    def _sample(self) -> None:
        if self.begun:
            rate = self.made / SAMPLE
            # As `statistics` does it; its own tests are below.
            if self.workers and ((self.begun["waiting"] and self.waiting) or self.worker_rate):
                self.worker_rate = max(self.worker_rate, rate / self.workers)
            told = {"tokens_per_second": rate, "worker_tokens_per_second": self.worker_rate}
            self.samples.append((self.now - SAMPLE, {**self.begun, **told}))
        running = round(self.backlog) - self.waiting
        self.begun = {"waiting": self.waiting, "running": running, "active": running}
        self.made = 0.0

    def read(self, client: Client) -> Scaling:
        """Returns the work as scripts measure it, and then starts or ends workers."""
        real = int(time.time() * 1000)
        pipeline = self.connection.pipeline()
        pipeline.delete(KEYS.pending, KEYS.leases, KEYS.statistics, KEYS.workers)
        pipeline.delete(KEYS.prefix + "outputs")
        pipeline.rpush(KEYS.prefix + "outputs", *(f"{real} {TOKENS}" for _ in range(10)))
        for at, sample in self.samples[-30:]:
            pipeline.xadd(KEYS.statistics, sample, f"{real - 1000 * (self.now - at)}-0")
        waits = {f"r{n}": real for n in range(self.waiting)}
        runs = {f"a{n}": real + 60_000 for n in range(round(self.backlog) - self.waiting)}
        for key, ids in ((KEYS.pending, waits), (KEYS.leases, runs)):
            if ids:
                pipeline.zadd(key, ids)
        for n in range(self.workers):
            pipeline.zadd(KEYS.workers, {f"w{n}": real + 60_000})
            pipeline.hset(KEYS.worker(f"w{n}"), "max_num_seqs", SLOTS)
        pipeline.execute()
        found = client.scaling()
        self.readings.append(found)
        wanted = found.desired - self.workers - len(self.starting)
        self.starting += [self.now + START_SECONDS] * wanted
        if found.desired < self.workers:
            self.workers = found.desired
        return found

    def play(self, client: Client, seconds: int, requests_per_second: float) -> list[int]:
        """Give the desired number at each reading."""
        found = []
        for _ in range(seconds):
            self.second(requests_per_second)
            if self.now % READING == 0:
                found.append(self.read(client).desired)
        return found


def test_ten_times_the_load_is_answered_within_two_readings_and_without_flapping(
    connection: Any, client: Client
) -> None:
    play = VirtualWorkers(connection)
    usual, burst = 1.2, 12.0  # 60 and 600 tokens a second: 0.75 and 7.5 workers at 80 %
    before = play.play(client, 300, usual)
    assert before[-8:] == [1] * 8, play.readings[-8:]
    during = play.play(client, 600, burst)
    enough, right = 6, 8
    assert during[1] in range(enough, right + 1), during
    assert during[-12:] == [right] * 12, during
    after = play.play(client, 600, usual)
    assert after[-8:] == [1] * 8, after
    highest = max(during)
    assert highest <= right + 3, "the backlog that came before the workers"
    down = during[during.index(highest) :] + after
    assert all(later <= earlier for earlier, later in itertools.pairwise(down)), down


def test_without_load_it_goes_to_nothing_and_back(connection: Any, client: Client) -> None:
    play = VirtualWorkers(connection)
    play.play(client, 120, 1.2)
    assert play.play(client, 300, 0.0)[-1] == 0
    assert play.workers == 0
    assert play.readings[-1].reason is Reason.IDLE
    play.backlog += 1
    assert play.read(client).desired == 1


def test_what_runs_keeps_its_workers(connection: Any, client: Client) -> None:
    """Long requests: nothing waits and nothing new comes, but two workers are full."""
    play = VirtualWorkers(connection, workers=2, backlog=2.0 * SLOTS)
    play.samples.append((-600, {"tokens_per_second": 200, "worker_tokens_per_second": RATE}))
    assert (play.waiting, play.read(client).desired) == (0, 2)
    assert play.readings[-1].reason is Reason.RUNNING


def put_deadlines(connection: Any, count: int, ms: int) -> None:
    at = int(time.time() * 1000) + ms
    connection.zadd(KEYS.deadlines, {f"d{n}": at for n in range(count)})


def test_deadlines_ask_for_workers_and_those_at_risk_are_counted(
    connection: Any, client: Client
) -> None:
    """40 requests of 50 tokens in 12 s are 20 s of work."""
    play = VirtualWorkers(connection, workers=1)
    play.samples.append((-600, {"tokens_per_second": 1, "worker_tokens_per_second": RATE}))
    put_deadlines(connection, 40, 12_000)
    found = play.read(client)
    assert (found.desired, found.reason) == (2, Reason.DEADLINES)
    assert found.deadlines_at_risk == pytest.approx(40 - 24, abs=1)


def test_before_anything_is_measured_there_is_one_worker_for_all_that_waits(
    client: Client,
) -> None:
    assert (client.scaling().desired, client.scaling().reason) == (0, Reason.IDLE)
    client.enqueue_many([{"prompt": "Once"}] * 100)
    found = client.scaling()
    assert (found.desired, found.waiting, found.waiting_seconds) == (1, 100, None)


def test_a_request_that_is_due_soon_wants_a_worker_and_one_of_next_hour_does_not(
    client: Client,
) -> None:
    client.enqueue("Once", delay_ms=3_600_000)
    assert client.scaling().desired == 0
    client.enqueue("Once", delay_ms=30_000)
    assert (client.scaling().desired, client.scaling().due_soon) == (1, 1)


def test_a_paused_queue_wants_workers_only_for_what_runs(client: Client) -> None:
    client.enqueue("Once")
    client.pause()
    assert client.scaling().desired == 0
    client.resume()
    assert client.scaling().desired == 1


def test_the_oldest_that_waits_too_long_keeps_the_workers(connection: Any, client: Client) -> None:
    """A large request that fits beside nothing: there are free places, yet it waits."""
    play = VirtualWorkers(connection, workers=3)
    play.samples.append((-600, {"tokens_per_second": 1, "worker_tokens_per_second": RATE}))
    play.backlog = 1
    play.read(client)
    connection.delete(KEYS.leases)
    connection.zadd(KEYS.pending, {"large": 1})
    connection.zadd(KEYS.workers, {f"w{n}": int(time.time() * 1000) + 60_000 for n in range(3)})
    connection.hset(KEYS.request("large"), "enqueued_at", int(time.time() * 1000) - 31_000)
    found = client.scaling()
    assert (found.desired, found.reason, found.oldest_seconds >= 31) == (3, Reason.OLDEST, True)


@dataclass
class Samples:
    """Samples of five seconds, without waiting for them."""

    connection: Any
    queue: RequestQueue

    def take(self, tokens: int) -> float:
        """A sample in which so many tokens were made; gives the rate of a worker after it."""
        self.queue.run(statistics.sample(statistics.Contribution(generated_tokens=tokens)))
        opened = KEYS.prefix + "statistics:open"
        bucket = int(self.connection.hget(opened, "bucket")) - 5000
        self.connection.hset(opened, "bucket", bucket)
        before = self.queue.run(statistics.samples(KEYS, 0))
        self.connection.delete(KEYS.statistics)
        if before:
            rate = before[-1].worker_tokens_per_second
            told = {"worker_tokens_per_second": rate}
            self.connection.xadd(KEYS.statistics, told, f"{bucket - 1}-0")
        assert self.queue.run(statistics.sample(statistics.Contribution())) == 1
        return self.queue.run(statistics.samples(KEYS, 0))[-1].worker_tokens_per_second


def test_the_rate_of_a_worker_is_what_it_makes_while_requests_wait(connection: Any) -> None:
    queue = RequestQueue(connection)
    samples = Samples(connection, queue)
    queue.run(scripts.heartbeat(WorkerStats(worker_id="w1"), 60_000))
    assert [samples.take(0), samples.take(500)] == [0, 0], "nothing waited"
    queue.enqueue([new("a"), new("b")])
    assert [samples.take(0), samples.take(500)] == [0, 0], "nothing ran"
    queue.take_batch(Room(max_count=1, token_budget=10**9))
    samples.take(0)
    assert samples.take(500) == 100
    assert samples.take(250) == pytest.approx(100 + 0.3 * (50 - 100))
    connection.hset(KEYS.config, "paused", 1)
    assert samples.take(5) == pytest.approx(85), "a pause says nothing of workers"
    connection.hdel(KEYS.config, "paused")
    queue.cancel("b")
    samples.take(0)
    assert samples.take(10) == pytest.approx(85), "nothing waits: it could have made more"
    assert samples.take(600) == 120
    queue.run(scripts.heartbeat(WorkerStats(worker_id="w2"), 60_000))
    assert samples.take(1200) == 120, "a worker that comes does not make the others faster"


def test_a_full_queue_estimates_when_there_is_room_by_the_same_rate(connection: Any) -> None:
    """Two requests too many, of three tokens each, at ten tokens a second."""
    queue = RequestQueue(connection)
    now = int(time.time() * 1000)
    for ago in (10, 5):
        connection.xadd(KEYS.statistics, {"tokens_per_second": 10}, f"{now - 1000 * ago}-0")
    connection.rpush(KEYS.prefix + "outputs", f"{now} 3", f"{now} 3")
    connection.hset(KEYS.config, "max_pending", 1)
    queue.enqueue([new()])
    with pytest.raises(QueueFullError) as caught:
        queue.enqueue([new(), new()])
    assert caught.value.retry_after_ms == 600


SPOILT = (
    {"outputs": ("rpush", "1 " + "9" * 400)},
    {"statistics": ("xadd", {"worker_tokens_per_second": "1e-310", "at": "now"})},
    {"statistics": ("xadd", {"worker_tokens_per_second": "nan", "tokens_per_second": "inf"})},
    {"workers": ("set", "text")},
    {"outputs": ("set", "text")},
    {"statistics": ("set", "text")},
    {"delayed": ("set", "text")},
    {"deadlines": ("set", "text")},
)


@pytest.mark.parametrize("spoilt", SPOILT, ids=lambda it: str(it)[:60])
def test_what_a_stranger_wrote_neither_fails_it_nor_asks_for_many(
    connection: Any, client: Client, spoilt: dict[str, tuple[str, Any]]
) -> None:
    put_deadlines(connection, 3, 60_000)
    client.enqueue("Once")
    for name, (command, value) in spoilt.items():
        if command == "set":
            connection.delete(KEYS.prefix + name)
        getattr(connection, command)(KEYS.prefix + name, value)
    assert 1 <= client.scaling().desired <= 3


def test_workers_that_claim_nothing_do_not_count(connection: Any, client: Client) -> None:
    queue = RequestQueue(connection)
    for state in ("running", "draining", "no_server"):
        stats = WorkerStats(worker_id=state, state=state, max_num_seqs=4)
        queue.run(scripts.heartbeat(stats, 60_000))
    assert client.scaling().workers == 1


def test_what_came_and_went_starts_no_worker(connection: Any, client: Client) -> None:
    play = VirtualWorkers(connection)
    play.samples.append((-20, {"tokens_per_second": 0, "worker_tokens_per_second": RATE}))
    play.samples.append((-10, {"tokens_per_second": 90, "worker_tokens_per_second": RATE}))
    play.workers = 0
    assert play.read(client).desired == 0


def test_a_backlog_is_begun_within_the_target(connection: Any, client: Client) -> None:
    """400 requests of half a second are 200 s of work for one worker."""
    play = VirtualWorkers(connection, workers=1, backlog=400 + 0.5 * SLOTS)
    play.samples.append((-600, {"tokens_per_second": 1, "worker_tokens_per_second": RATE}))
    found = play.read(client)
    assert (found.desired, found.reason) == (7, Reason.BACKLOG)
    assert client.scaling(target_seconds=100).desired == 2


@pytest.mark.parametrize(("guess", "expected"), [(2 * TOKENS, 2 * TOKENS), (10**9, 3 * TOKENS)])
def test_expected_outputs_count_as_far_as_guesses_came_true(
    connection: Any, client: Client, guess: int, expected: int
) -> None:
    """A guess counts as at most the longest of the last answers."""
    connection.xadd(KEYS.statistics, {"worker_tokens_per_second": RATE})
    connection.hset(KEYS.config, "shortest_first_ms", 500)
    lengths = [TOKENS // 2, TOKENS // 2, TOKENS // 2, 3 * TOKENS, TOKENS // 2] * 20
    connection.rpush(KEYS.prefix + "outputs", *(f"1 {length}" for length in lengths))
    for _ in range(20):
        client.enqueue("Once", expected_tokens=guess, max_tokens=10**9)
        client.enqueue("Once")
    without_trust, mean = client.scaling(10), sum(lengths) / len(lengths)
    pairs = [f"{length} {length}" for length in lengths]
    connection.rpush(KEYS.prefix + "statistics:guesses", *pairs)
    with_trust = client.scaling(10)
    assert without_trust.waiting_seconds == 40 * mean / RATE
    assert with_trust.waiting_seconds == 20 * (mean + expected) / RATE
    assert without_trust.desired < with_trust.desired


@pytest.mark.parametrize("target", [0, -1, float("nan"), float("inf")])
def test_a_target_that_is_no_time_is_refused(client: Client, target: float) -> None:
    with pytest.raises(ConfigurationError, match="target"):
        client.scaling(target)
