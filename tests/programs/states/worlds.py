"""The worlds that `python -m tests states` explores; the tests explore the small ones."""

from __future__ import annotations

from dataclasses import replace

from tests.programs.states.moves import ALL, REQUIRED
from tests.programs.states.world import AMPLE, STRAY, Spec, World

_ONE = World(
    (Spec("r1", 100, priority=1, delay_ms=1000, deadline_ms=1000),),
    ALL - {"requeue", "again", "both", "session"},
    losses=2,
    max_crashes=2,
    all_positions=True,
)
_PLAIN = World(
    (Spec("r1", 100, plain=True),),
    ALL - {"requeue", "purge", "fortnight", "time", "pause", "session"},
    losses=1,
    max_crashes=2,
    all_positions=True,
)

SMALL = {
    "one request, everything but that it is forgotten": replace(
        _ONE,
        specs=(replace(_ONE.specs[0], num_tokens=2),),
        moves=_ONE.moves - {"forget", "lapse", "purge", "fortnight"},
    ),
    "one request of one token by plain commands, everything": replace(
        _PLAIN, specs=(replace(_PLAIN.specs[0], num_tokens=1),), moves=_PLAIN.moves - {"step"}
    ),
    "a dead letter and what is made of it": World(
        (Spec("r1", 100, num_tokens=2), Spec("r2", 200, num_tokens=1, requeue_of="r1")),
        REQUIRED | {"requeue", "purge", "fortnight", "fail"},
        losses=2,
        max_crashes=2,
    ),
    "two requests, each losing its worker once": World(
        (Spec("r1", 100, priority=1), Spec("r2", 200, num_tokens=1)), REQUIRED, losses=1
    ),
    "two requests of one idempotency key, forgotten": World(
        (
            Spec("r1", 100, num_tokens=1, idempotency_key="once"),
            Spec("r2", 200, num_tokens=1, idempotency_key="once"),
        ),
        frozenset({"produce", "claim", "publish", "tidy", "forget", "lapse"}),
        losses=0,
        num_workers=1,
    ),
    "claims whose reply is lost": World(
        (Spec("r1", 100, num_tokens=2),),
        REQUIRED | {"session", "lapse", "release"},
        losses=1,
        num_workers=1,
    ),
    "claims that come late": World(
        (Spec("r1", 100, num_tokens=1),),
        REQUIRED | {"session", "overtaken", "lapse"},
        losses=1,
        num_workers=1,
    ),
    "two requests, each of one token, in one call": World(
        (Spec("r1", 100, num_tokens=1), Spec("r2", 200, num_tokens=1)),
        REQUIRED - {"cancel", "renew", "wait"} | {"together"},
        losses=1,
        num_workers=1,
    ),
    "two requests, one of a tenant, that get other priorities": World(
        (
            Spec("r1", 100, num_tokens=1, priority=1, delay_ms=1000, tenant="t1"),
            Spec("r2", 200, num_tokens=1, plain=True),
        ),
        REQUIRED - {"cancel", "renew"} | {"priority"},
        losses=1,
        num_workers=1,
        priorities=(-1,),
    ),
    "two requests of a tenant that may run one": World(
        (
            Spec("r1", 100, num_tokens=1, tenant="t1"),
            Spec("r2", 200, num_tokens=1, tenant="t1"),
        ),
        frozenset({"produce", "claim", "publish", "expire", "reap", "release"}),
        losses=1,
        num_workers=1,
        config=("max_running:t1", "1"),
    ),
    "one request by plain commands with a deadline, put in again": World(
        (Spec("r1", 100, num_tokens=2, deadline_ms=1000, plain=True),),
        REQUIRED | {"again", "time", "tidy"},
        losses=1,
        num_workers=1,
    ),
    "one request that plain commands leave behind": World(
        (Spec("r1", 100, num_tokens=2, plain=True),),
        STRAY | REQUIRED | {"sweep", "grace", "again", "flag"},
        losses=1,
        num_workers=1,
    ),
    "one request into whose log a stranger writes": World(
        (Spec("r1", 100, num_tokens=2),),
        REQUIRED | {"spoil", "fail", "release", "break", "tidy"},
        losses=1,
        num_workers=1,
        max_crashes=2,
    ),
}
LARGE = {
    "one request, everything": _ONE,
    "one request by plain commands, everything": _PLAIN,
    "claims of two requests whose reply is lost": World(
        (Spec("r1", 100, num_tokens=1), Spec("r2", 200, num_tokens=1)),
        REQUIRED | {"session", "lapse"},
        losses=1,
        num_workers=1,
    ),
    "two requests, each losing its worker twice, several in a call": World(
        (Spec("r1", 100, priority=1), Spec("r2", 200)),
        REQUIRED | {"step"},
        losses=2,
        max_crashes=2,
    ),
    "one by plain commands, and what is requeued of it, nearly everything": World(
        (Spec("r1", 100, plain=True), Spec("r2", 200, num_tokens=1, requeue_of="r1")),
        ALL - {"pause", "late", "session", "both", "forget", "lapse"},
        losses=2,
        max_crashes=2,
    ),
    "two requests, one by plain commands, with deadline and drain": World(
        (Spec("r1", 100, priority=1, deadline_ms=1000), Spec("r2", 200, num_tokens=1, plain=True)),
        REQUIRED | {"release", "flag", "time", "step"},
        losses=1,
        max_crashes=2,
    ),
}

WALKED = World(
    (
        Spec("r1", 100, priority=-2, deadline_ms=1000, idempotency_key="once"),
        Spec("r2", 200, num_tokens=5, delay_ms=1000, tenant="t1"),
        Spec("r3", 300, plain=True),
        Spec("r4", 400, priority=1, tenant="t2"),
        Spec("r5", 500, idempotency_key="once"),
        Spec("r6", 600, requeue_of="r1"),
    ),
    ALL | {"priority", "overtaken", "together", "half", "drop", "sweep", "grace", "spoil"},
    losses=3,
    num_workers=3,
    all_positions=True,
    priorities=(-1, 2),
    budgets=(AMPLE, 40, 0),
    config=("max_pending", "3"),
)
"""Too large to be explored; random walks lead through it."""
