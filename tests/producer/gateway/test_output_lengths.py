"""Where a queue runs short requests first, the gateway guesses the outputs of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

import httpx2
import pytest
import redis

from promptq.producer.calls import queues
from promptq.producer.calls.output_lengths import OutputLengths, features_of
from promptq.producer.clients.request_builder import compose
from promptq.shared.protocol.request import NewRequest, Request
from promptq.shared.queue.call import carry_out
from tests.producer.gateway.living import LiveGateway, live_worker
from tests.producer.playing import KEYS, HandWorker
from tests.support.model_free import text_of

LENGTHS = {"Name the colour of the": 8, "Write a long story about the": 60}
"""Output tokens of each kind of prompt."""
NOUNS = ["fox", "hare", "owl", "sun", "sea"]
LARGE = {"metadata": {"padding": "x" * 70_000}}
"""A field that makes a body so large that another process reads it."""


@pytest.fixture
def ask(
    gateway: LiveGateway,
    redis_url: str,
    everything: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., int | None]]:
    """Sends a call whose output ends at a stop string. Returns the guess that its request had."""
    monkeypatch.setattr(queues, "_FRESH_SECONDS", 0.0)

    def ask(prompt: str, num_tokens: int, **fields: Any) -> int | None:
        body = {"prompt": prompt, "seed": 3, "stop": text_of(3, num_tokens)[-6:], "max_tokens": 90}
        answer = http.post("/v1/completions", json={**body, **fields}).json()
        guess = everything.hget(KEYS.request(answer["id"]), "expected_tokens")
        return None if guess is None else int(guess)

    with live_worker(redis_url), httpx2.Client(base_url=gateway.url, timeout=60) as http:
        yield ask


def in_turns(number: int) -> Iterator[tuple[str, int]]:
    """Yields prompts of both kinds, with the length of their outputs."""
    kinds = cycle(LENGTHS.items())
    for (kind, length), noun in islice(zip(kinds, cycle(NOUNS), strict=False), number):
        yield f"{kind} {noun}", length


def test_guesses_come_in_the_order_of_the_outputs(
    ask: Callable[..., int | None], everything: redis.Redis
) -> None:
    """In large bodies, too. A guess of the client has precedence."""
    everything.hset(KEYS.config, "shortest_first_ms", 1000)
    guesses = [ask(*call) for call in in_turns(40)]
    assert guesses[:16] == [None] * 16
    assert None not in guesses[17:]
    for more in ({}, LARGE):
        short, long = (ask(f"{kind} moon", length, **more) for kind, length in LENGTHS.items())
        assert short is not None
        assert long is not None
        assert short < 20 < 40 < long < 90
    assert ask(*next(in_turns(1)), expected_tokens=7) == 7


def test_a_quote_has_the_guess_of_its_request(
    ask: Callable[..., int | None],
    gateway: LiveGateway,
    everything: redis.Redis,
    own_worker: HandWorker,
) -> None:
    everything.hset(KEYS.config, "shortest_first_ms", 1_000_000)
    for call in in_turns(40):
        ask(*call)
    everything.hset(KEYS.config, "paused", 1)
    own_worker.queue.enqueue(requests(1))
    bodies = ({"prompt": f"{kind} moon", "max_tokens": 90} for kind in LENGTHS)
    quotes = [httpx2.post(f"{gateway.url}/v1/quote", json=body).json() for body in bodies]
    assert [quote["in_front"] for quote in quotes] == [0, 1]


def test_a_queue_in_order_of_arrival_gets_no_guesses(
    ask: Callable[..., int | None], everything: redis.Redis
) -> None:
    """Its outputs are not learned, so it begins anew when it gets the setting."""
    assert [ask(*call) for call in in_turns(17)] == [None] * 17
    everything.hset(KEYS.config, "shortest_first_ms", 1000)
    assert [ask(*call) for call in in_turns(2)] == [None] * 2


def requests(number: int, **fields: Any) -> list[NewRequest]:
    return compose([{"prompt": "Once", **fields} for _ in range(number)])


def learned(own_worker: HandWorker, lengths: OutputLengths, number: int, **fields: Any) -> None:
    """Lets the worker end `number` requests, and learns from them."""
    own_worker.queue.enqueue(lengths.with_guesses(requests(number, **fields), ()))
    for _ in range(number):
        own_worker.finish(own_worker.take(), "xxx")
    carry_out(lengths.learn(KEYS), own_worker.queue.run)


def guess(lengths: OutputLengths, **fields: Any) -> int | None:
    [new] = lengths.with_guesses(requests(1, **fields), ())
    return new.request.expected_tokens


def test_a_tenant_sees_nothing_of_the_outputs_of_another(own_worker: HandWorker) -> None:
    lengths = OutputLengths()
    learned(own_worker, lengths, 20, tenant="a")
    assert guess(lengths, tenant="a") == 3
    assert guess(lengths, tenant="b") is None
    assert guess(lengths) is None
    for number in range(64):
        guess(lengths, tenant=f"{number}")
    assert guess(lengths, tenant="a") is None, "64 others came since"


@pytest.mark.parametrize(
    "fields", [{"embed": {}}, {"tokenize": True}, {"completion_window": "2h"}, {"delay_ms": 1}]
)
def test_a_request_that_is_not_ordered_by_its_output(
    own_worker: HandWorker, fields: dict[str, Any]
) -> None:
    """No place among the watched ones is taken by it."""
    lengths = OutputLengths()
    lengths.with_guesses(requests(200), (), watch=False)
    learned(own_worker, lengths, 16)
    assert guess(lengths, **fields) == (3 if "delay_ms" in fields else None)
    assert not lengths._watched


def test_long_outputs_keep_their_places_while_they_run(own_worker: HandWorker) -> None:
    """No tenant takes all places, and ended requests free theirs, whatever became of them."""
    lengths = OutputLengths()
    first = lengths.with_guesses(requests(200), ())
    others = lengths.with_guesses(requests(200, tenant="a"), ())
    watched = [new.request_id for new in (*first[:64], *others[:32])]
    assert [*lengths._watched] == watched
    own_worker.queue.enqueue(first[:3])
    own_worker.redis.hset(KEYS.request(watched[2]), "state", "completed")
    own_worker.redis.hset(KEYS.request(watched[2]), "finish_reason", "stop")
    own_worker.redis.hset(KEYS.request(watched[2]), "last_event", "[" * 9999)
    carry_out(lengths.learn(KEYS), own_worker.queue.run)
    assert [*lengths._watched] == watched[:2], "the other requests were not enqueued"


TURN = [{"role": "user", "content": "x"}]
DEEP: Any = "x"
for _ in range(150):
    DEEP = {"function": DEEP}
TOOL = {"type": "function", "function": {"name": "x" * 9999, "parameters": DEEP}}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x" * 1_000_000},
        {"prompt": ". " * 1_000_000},
        {"messages": [{"role": "user", "content": "\u0130\U0001f98a " * 99_999}]},
        {"prompt": [7, *range(50_000)]},
        {"messages": [{"role": "system"}, {"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a " * 99}] * 9}]},
        {"messages": [{**TURN[0], "x": DEEP}], "tools": [TOOL] * 1024, "tool_choice": "auto"},
        {"messages": TURN, "chat_template_kwargs": {"k" * 999 + f"{n}": n for n in range(999)}},
    ],
)
def test_a_hostile_request_has_few_features(fields: dict[str, Any]) -> None:
    found = features_of(Request.build(fields))
    assert 3 < len(found) == len({*found}) < 200
    assert all(0 <= each < 4096 for each in found)


def test_half_a_character_is_a_feature_like_another() -> None:
    assert features_of(Request.model_construct(prompt="a \ud800", tools=[{"name": "\udfff"}]))
