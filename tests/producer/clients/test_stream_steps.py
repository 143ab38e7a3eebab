"""The rules of a stream, one step at a time: what is asked of the server, and when."""

from __future__ import annotations

import re
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
import redis
from rich.console import Console

from promptq.producer.clients.resumable_stream import (
    GIVE_UP_SECONDS,
    Action,
    Ask,
    Notice,
    Sleep,
    Steps,
    Subscribe,
    Wait,
    advance,
    follow,
)
from promptq.producer.commands.screens.demo_view import Board, Shown, requests_table
from promptq.shared.errors import RequestNotFoundError
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.request import FinishReason
from tests.producer.playing import KEYS, HandWorker

Send = Callable[[Any], tuple[list[str], Action | None]]


def sender(steps: Steps, worker: HandWorker) -> Send:
    """Carries out all but waiting; gives the texts that came and the action it stopped at."""

    def send(answer: Any) -> tuple[list[str], Action | None]:
        texts = []
        action = advance(steps, answer)
        while isinstance(action, Ask | TokenEvent | Subscribe):
            answer = None
            if isinstance(action, TokenEvent):
                texts.append(action.text)
            elif isinstance(action, Ask):
                try:
                    answer = worker.queue.run(action.call)
                except redis.ResponseError as error:
                    answer = error
            action = advance(steps, answer)
        return texts, action

    return send


def test_nothing_is_read_before_the_subscription_stands(own_worker: HandWorker) -> None:
    """Read sooner, and an event between the two would be lost until the silence is over."""
    steps = follow(KEYS, "x")
    asked = advance(steps, None)
    assert isinstance(asked, Ask)
    assert asked.call.args[:2] == ["HGET", KEYS.config]
    assert advance(steps, False) == Subscribe(KEYS.events("x"), sharded=False)
    assert advance(steps, None) == Wait(3.0)


@pytest.mark.parametrize("tenant", ["", "acme"])
@pytest.mark.parametrize("hash_type", ["none", "string", "plain"])
def test_a_pending_id_is_known(own_worker: HandWorker, hash_type: str, tenant: str) -> None:
    """Whatever its hash is, a worker will find it and end it."""
    if hash_type == "plain":
        own_worker.redis.hset(KEYS.request("raw"), "payload", "{}")
    elif hash_type == "string":
        own_worker.redis.set(KEYS.request("raw"), "what is this")
    own_worker.redis.zadd(KEYS.pending_of(tenant), {"raw": 1})
    if tenant:
        own_worker.redis.sadd(KEYS.tenants_waiting, "another", tenant)
    send = sender(follow(KEYS, "raw"), own_worker)
    send(None)
    assert send(Notice.SUBSCRIBED) == ([], Wait(3.0))
    own_worker.redis.zrem(KEYS.pending_of(tenant), "raw")
    if hash_type != "plain":
        with pytest.raises(RequestNotFoundError):
            send(None)


def test_a_hole_in_the_log_is_not_jumped(own_worker: HandWorker) -> None:
    """Otherwise a reader would get the later tokens without those in the hole."""
    own_worker.redis.hset(KEYS.request("x"), "payload", "{}")
    own_worker.redis.zadd(KEYS.pending, {"x": 1})
    claim = own_worker.take()
    send = sender(follow(KEYS, "x"), own_worker)
    send(None)
    own_worker.log_only(claim, "a")
    own_worker.event(claim, "lost")
    own_worker.log_only(claim, "b")
    assert send(Notice.SUBSCRIBED) == (["a"], Wait(3.0))
    assert send(None) == ([], Wait(3.0))


def test_lost_connections_are_tried_again_ever_later(own_worker: HandWorker) -> None:
    """The pauses grow, until the server was away too long; a quiet while makes it start anew."""
    own_worker.redis.hset(KEYS.request("x"), "payload", "{}")
    now = 0.0
    lost = redis.ConnectionError("lost")
    send = sender(follow(KEYS, "x", silence=60, clock=lambda: now), own_worker)
    send(None)
    pauses = []
    for _ in range(8):
        _, action = send(lost)
        assert isinstance(action, Sleep)
        pauses.append(action.seconds)
        send(None)
    assert pauses[0] < pauses[-1] / 4
    now += GIVE_UP_SECONDS
    send(None)  # a quiet while
    for away in (0, GIVE_UP_SECONDS / 2):
        now += away
        _, action = send(lost)
        assert isinstance(action, Sleep)
        assert action.seconds < pauses[-1]
        send(None)
    now += GIVE_UP_SECONDS / 2
    with pytest.raises(redis.ConnectionError):
        send(lost)


def test_a_server_that_keeps_coming_back_is_not_given_up(own_worker: HandWorker) -> None:
    """The server is away most of the time, but it answers each time before it goes again."""
    own_worker.redis.hset(KEYS.request("x"), "payload", "{}")
    now = 0.0
    send = sender(follow(KEYS, "x", silence=60, clock=lambda: now), own_worker)
    send(None)
    for _ in range(10):
        _, action = send(redis.ConnectionError("lost"))
        assert isinstance(action, Sleep)
        now += GIVE_UP_SECONDS / 2
        send(None)
        send(Notice.SUBSCRIBED)


def test_refused_credentials_are_not_tried_again(own_worker: HandWorker) -> None:
    """They will not become right."""
    send = sender(follow(KEYS, "x"), own_worker)
    send(None)
    with pytest.raises(redis.AuthenticationError):
        send(redis.AuthenticationError("WRONGPASS"))


def test_time_is_up_at_the_timeout() -> None:
    """The last wait is no longer than what is left."""
    now = 100.0
    steps = follow(KEYS, "x", timeout=5, silence=3, clock=lambda: now)
    advance(steps, None)
    advance(steps, False)
    assert advance(steps, None) == Wait(3)
    now = 104.0
    assert isinstance(advance(steps, redis.ConnectionError("lost")), Sleep)
    advance(steps, None)
    advance(steps, False)
    assert advance(steps, None) == Wait(1.0)
    now = 105.0
    with pytest.raises(TimeoutError, match="'x' did not end within 5 seconds"):
        advance(steps, redis.ConnectionError("lost"))


@pytest.mark.parametrize(
    ("columns", "lines", "fits"), [(80, 24, True), (160, 45, True), (50, 40, True), (80, 8, False)]
)
def test_the_demo_fits_the_terminal(columns: int, lines: int, fits: bool) -> None:
    """Every panel shows the end of its text; in a terminal too small the last ones are cropped."""
    shown = [
        Shown(f"part {n}", n, "", text=f"once upon a time there was {n:02d}") for n in range(12)
    ]
    out = StringIO()
    Console(file=out, width=columns, height=lines).print(Board(shown, slots=4))
    screen = out.getvalue()
    for n in range(12):
        assert f"part {n} (+{n})" in screen
        assert f" {n:02d} " in screen
    assert (len(screen.splitlines()) < lines) == fits


@pytest.mark.parametrize(("columns", "has_tokens"), [(80, True), (50, False), (30, False)])
def test_the_demos_last_table_breaks_no_word(columns: int, has_tokens: bool) -> None:
    """Lines without room in the terminal are left out."""
    ended = Shown("urgent chat", -10, "", num_tokens=60, queue_ms=1234.0)
    ended.finish_reason = FinishReason.CANCELLED
    out = StringIO()
    Console(file=out, width=columns).print(requests_table([ended], columns))
    assert re.search("urgent chat .*cancelled", out.getvalue())
    assert ("tokens/s" in out.getvalue()) == has_tokens
    assert max(map(len, out.getvalue().splitlines())) <= columns
