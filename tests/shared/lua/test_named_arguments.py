"""Scripts take their arguments by name, or by position as release 0.3 sends them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import hiredis
import pytest
import redis

from promptq.shared.queue.call import Argument, Call
from tests.programs.states.calls import Move
from tests.programs.states.server import Outcome, StatesServer

NUM_CALLS = 300

Values = list[Argument]


def by_name(values: dict[str, Argument], rng: random.Random, rest: Sequence[Argument]) -> Values:
    """In any order, without some of the empty values."""
    names = [name for name, it in values.items() if it != "" or rng.random() < 0.5]
    rng.shuffle(names)
    args: Values = ["promptq:named"]
    for name in names:
        args += [name, values[name]]
    return [*args, "then", *rest] if rest else args


def enqueue(rng: random.Random) -> tuple[Values, Values]:
    rows = [
        {
            "id": f"r{rng.randrange(200)}",
            "payload": json.dumps({"prompt": "Once", "max_tokens": rng.randrange(1, 9)}),
            "priority": rng.randrange(-2, 3),
            "deadline_ms": rng.choice([0, 0, 5000]),
            "delay_ms": rng.choice([0, 0, 3000]),
            "idempotency_key": rng.choice(["", "", "k1", "k2"]),
            "tenant": rng.choice(["", "a", "b", "not a name"]),
            "account": rng.choice(["", "600 key"]),
            "forked_from": rng.choice(["", "2 r1"]),
        }
        for _ in range(rng.randint(1, 3))
    ]
    width = rng.randrange(6, 10)
    fields = [*rows[0]][:width]
    sent = rng.sample(fields, width)
    header: dict[str, Argument] = {
        "idempotency_ms": 60_000,
        "fields": ",".join(sent),
        "nonce": rng.choice(["", "n1", "n2"]),
    }
    first = "60000" if width == 6 and rng.random() < 0.5 else f"60000 {width}"
    values = [row[name] for row in rows for name in fields]
    nonce = [header["nonce"]] if header["nonce"] else []
    return [first, *values, *nonce], by_name(
        header, rng, [row[name] for row in rows for name in sent]
    )


def claim(rng: random.Random) -> tuple[Values, Values]:
    values: dict[str, Argument] = {
        "worker": rng.choice(["w1", "w2"]),
        "lease_ms": 60_000,
        "max_count": rng.randrange(4),
        "token_budget": rng.choice([0, 20, 10**6]),
        "capacity": rng.choice([15, 2**53]),
        "nonce": f"n{rng.randrange(6)}",
        "version": 1,
        "model": rng.choice(["", "m"]),
        "fingerprint": rng.choice(["", "f", "f", "other"]),
        "preemptible": rng.choice(["", "1:10 2:20"]),
        "seed_base": rng.choice(["", "seeds "]),
        "num_held": rng.randrange(3),
        "session": rng.choice(["", "s"]),
        "answered": rng.choice(["", "n1"]),
        "skip": rng.randrange(3),
        "number": rng.randrange(5),
        "output_style": rng.choice(["", '{"form":"object"}']),
        "num_sharing": rng.randrange(1, 4),
        "held": rng.choice(["", "0:2:40:a", "0:1:5:a 0:1:5:b"]),
    }
    num_sent = rng.randint(11, len(values))  # older workers leave the last ones out
    return both(dict([*values.items()][:num_sent]), rng)


def statistics(rng: random.Random) -> tuple[Values, Values]:
    values: dict[str, Argument] = {
        "generated_tokens": rng.randrange(100),
        "prompt_tokens": rng.randrange(100),
        "finished": rng.randrange(100),
        "ttft": rng.choice(["", "12", "3 4000 17"]),
        "queue": rng.choice(["", "5", "2 9"]),
    }
    return both(values, rng)


def store_response(rng: random.Random) -> tuple[Values, Values]:
    values: dict[str, Argument] = {
        "what": rng.choice(["add", "add", "end", "forget"]),
        "tenant": rng.choice(["", "a"]),
        "id": f"resp_{rng.randrange(5)}",
        "added": rng.randrange(100),
        "ttl_ms": 60_000,
        "most": rng.choice([0, 3]),
        "most_bytes": rng.choice([0, 150]),
    }
    return both(values, rng, rng.choice([[], ["then", "{}"], ["call", "{}", "id", "x"]]))


def both(
    values: dict[str, Argument], rng: random.Random, rest: Sequence[str] = ()
) -> tuple[Values, Values]:
    return [*values.values(), *rest], by_name(values, rng, rest)


SCRIPTS = {it.__name__: it for it in (enqueue, claim, statistics, store_response)}


@pytest.fixture
def states_server(embedded_url: str) -> Iterator[StatesServer]:
    with redis.Redis.from_url(embedded_url) as client:
        client.flushall()
    port = urlsplit(embedded_url).port
    assert port is not None
    server = StatesServer(port)
    yield server
    server.close()


def outcome(server: StatesServer, before: bytes, script: str, args: Values) -> Outcome:
    made = server.step(before, Move("call", script, (Call(script, args, lambda reply: reply),), ()))
    answers = [str(it) if isinstance(it, hiredis.ReplyError) else it for it in made.answers]
    return made._replace(answers=answers)


def test_names_and_positions_do_the_same(states_server: StatesServer, seed: int) -> None:
    """From each state that random calls lead to: the reply, all keys and all messages."""
    rng = random.Random(seed)
    state, changed = b"[]", dict.fromkeys(SCRIPTS, 0)
    for _ in range(NUM_CALLS):
        script = rng.choice(list(SCRIPTS))
        positions, names = SCRIPTS[script](rng)
        one, other = (outcome(states_server, state, script, args) for args in (positions, names))
        assert one == other, (script, positions, names)
        changed[script] += one.after != state
        state = one.after
    assert all(changed.values()), changed


@pytest.mark.parametrize(
    ("script", "args", "error"),
    [
        (
            "claim",
            ["worker", "w", "lease_ms", 1, "max_cout", 1],
            "max_count: this script needs it; it has worker,",
        ),
        ("statistics", ["finish", 1], "finish: this script has no such argument; it has generated"),
        (
            "enqueue",
            ["idempotency_ms", 1, "fields", "id,prio", "then", "it", 1],
            "prio: a request has no such field; it has id, payload,",
        ),
        ("enqueue", ["idempotency_ms", 1, "fields", "", "then", "it"], "'id'"),
    ],
)
def test_a_wrong_name_is_refused_by_name(
    states_server: StatesServer, script: str, args: Values, error: str
) -> None:
    made = outcome(states_server, b"[]", script, ["promptq:named", *args])
    [answer] = made.answers
    assert isinstance(answer, str)
    assert error in answer
    assert made.after == b"[]"
