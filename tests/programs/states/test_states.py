"""All states that the scripts can reach in small worlds fulfil all invariants."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
import redis

from promptq.shared.protocol.rows import RowStatus
from promptq.shared.server.embedded import EmbeddedServer
from tests.programs.states import calls
from tests.programs.states.explore import (
    ALL_INVARIANTS,
    Invariants,
    TooManyStatesError,
    ViolationError,
    explore,
    walk,
)
from tests.programs.states.mutants import MUTANTS, Mutant
from tests.programs.states.server import StatesServer
from tests.programs.states.worlds import SMALL, WALKED
from tests.support.roles import drop_password


def emptied(url: str) -> int:
    """Delete all data on the server. Returns the server's port."""
    with redis.Redis.from_url(url) as client:
        client.flushall()
    port = urlsplit(url).port
    assert port is not None
    return port


MOST_STATES = 10_000
"""The most states of a small world. With a broken script, a world may be infinite."""


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", SMALL)
def test_every_invariant_holds_in_every_state(embedded_url: str, name: str) -> None:
    seen = explore(SMALL[name], emptied(embedded_url), most_states=MOST_STATES)
    print(f"{name}: {seen.states} states, {seen.moves} moves, {seen.seconds:.1f} s")
    assert seen.states > 50
    never = SMALL[name].moves - {"wait"} - set(seen.kinds)
    assert not never, "these moves never changed anything"
    if SMALL[name].moves >= {"publish", "cancel", "time"}:
        assert seen.statuses == set(RowStatus) - {RowStatus.ERROR}


def test_every_invariant_holds_on_redis_too(redis_server_url: str) -> None:
    world = SMALL["a dead letter and what is made of it"]
    assert explore(world, emptied(redis_server_url), most_states=MOST_STATES).states > 50


@pytest.mark.matrix(16)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.breaks)
def test_each_invariant_finds_a_script_that_breaks_it(embedded_url: str, mutant: Mutant) -> None:
    only = Invariants.only(mutant.breaks)
    with pytest.raises(ViolationError) as found:
        explore(mutant.world, emptied(embedded_url), mutant.texts(), only, MOST_STATES)
    print(found.value)
    assert found.value.invariant == mutant.breaks


def test_scripts_that_never_settle_are_found_by_their_many_states(embedded_url: str) -> None:
    world = SMALL["two requests, each losing its worker once"]
    nothing = Invariants(states=(), changes=(), answers=(), progress=False)
    with pytest.raises(TooManyStatesError, match="more than 20 states"):
        explore(world, emptied(embedded_url), invariants=nothing, most_states=20)


def test_a_server_that_goes_away_ends_the_exploration() -> None:
    move = calls.reap(max_crashes=3)
    with EmbeddedServer() as embedded:
        drop_password(embedded.url)
        server = StatesServer(embedded.port)
        server.step(b"[]", move)
    with pytest.raises(ConnectionError):
        server.step(b"[]", move)
    server.close()


def test_there_is_a_mutant_for_each_invariant() -> None:
    assert {mutant.breaks for mutant in MUTANTS} == set(ALL_INVARIANTS.names)


@pytest.mark.parametrize("server", ["embedded_url", "redis_server_url"])
def test_random_walks_through_a_larger_world_find_nothing(
    request: pytest.FixtureRequest, server: str
) -> None:
    port = emptied(request.getfixturevalue(server))
    changes = walk(WALKED, port, num_walks=25, num_steps=50, shortens=False)
    assert len(+changes) > 10, "the walks went nowhere"


def test_random_walks_find_a_broken_script(embedded_url: str) -> None:
    broken = "what_has_ended_never_changes"
    (mutant,) = (it for it in MUTANTS if (it.breaks, it.script) == (broken, "publish"))
    port, texts = emptied(embedded_url), mutant.texts()
    with pytest.raises(ViolationError):
        walk(WALKED, port, num_walks=1000, num_steps=50, texts=texts, shortens=False)
