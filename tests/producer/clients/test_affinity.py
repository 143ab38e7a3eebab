"""Hashes of the beginnings of prompts and chats, and of sessions."""

from __future__ import annotations

from typing import Any

import pytest

from promptq.producer.clients.affinity import affinity_of
from promptq.producer.clients.request_builder import compose
from promptq.shared.errors import InvalidRequestError

TEXT = "".join(f"{n}, " for n in range(20_000))


def hashes(**fields: Any) -> list[str]:
    [new] = compose([fields])
    return new.affinity.split()


@pytest.mark.parametrize(("length", "count"), [(1023, 0), (1024, 1), (16_384, 3), (100_000, 4)])
def test_each_length_that_a_prompt_has_adds_a_hash(length: int, count: int) -> None:
    found = hashes(prompt=TEXT[:length])
    assert len(found) == (count + 1 if count else 0)
    assert hashes(prompt=TEXT[:length] + "more")[: len(found)] == found
    assert hashes(prompt="!" + TEXT[:length]) != found or not count


@pytest.mark.parametrize("kind", ["ids", "chat", "tools"])
def test_what_follows_does_not_change_the_hash_of_a_beginning(kind: str) -> None:
    first = {"role": "system", "content": TEXT[:5000]}
    more = [first, {"role": "user", "content": "Hi"}]
    tool = {"type": "function", "function": {"name": "f", "description": TEXT[:2000]}}
    one: dict[str, Any] = {"messages": [first]}
    other: dict[str, Any] = {"messages": more}
    if kind == "ids":
        one, other = {"prompt": [*range(1000)]}, {"prompt": [*range(1001)]}
    elif kind == "tools":
        one, other = {"messages": more, "tools": [tool]}, {"messages": more[1:], "tools": [tool]}
    common = [a for a, b in zip(hashes(**one), hashes(**other), strict=False) if a == b]
    assert len(common) == (2 if kind == "tools" else 3 if kind == "chat" else 2)


def test_tenants_and_salts_have_other_hashes() -> None:
    fields = {"prompt": TEXT[:2000], "session": "s"}
    found = [hashes(**fields), hashes(**fields, tenant="a"), hashes(**fields, cache_salt="a")]
    assert len({*found[0], *found[1], *found[2]}) == 6


def test_a_session_is_not_part_of_the_payload() -> None:
    """Workers of earlier releases would refuse it."""
    [new] = compose([{"prompt": "a", "session": "s"}])
    assert new.to_payload() == '{"prompt":"a"}'
    assert affinity_of(new.request) == new.affinity != ""


@pytest.mark.parametrize("session", ["", "s" * 129, 3])
def test_a_wrong_session_is_refused_by_name(session: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^session: "):
        compose([{"prompt": "a", "session": session}])
