"""Names stay within their queue."""

from __future__ import annotations

import pytest

from promptq.shared.errors import ConfigurationError, InvalidRequestError
from promptq.shared.protocol.keys import Keys, check_request_id


def test_names_are_the_public_ones() -> None:
    keys = Keys("jobs")
    assert keys.pending == "promptq:{jobs}:pending"
    assert keys.request("r1") == "promptq:{jobs}:request:r1"
    assert keys.tokens("r1") == "promptq:{jobs}:tokens:r1"
    assert keys.events("r1") == "promptq:{jobs}:events:r1"
    assert keys.worker("w1") == "promptq:{jobs}:worker:w1"
    assert keys.pending_of("team.1") == "promptq:{jobs}:pending:team.1"
    assert keys.pending_of("") == keys.pending


@pytest.mark.parametrize("name", ["", "a}b", "{", "a b", "a:b", "a*", "é", "a" * 65, "a\n"])
def test_a_queue_name_cannot_leave_its_braces(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^queue: "):
        Keys(name)


@pytest.mark.parametrize("name", ["a:b", "a b", "*", "}{", "é", "a" * 65, "a\n"])
def test_a_tenants_name_cannot_leave_its_key(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^tenant: "):
        Keys("jobs").pending_of(name)


@pytest.mark.parametrize(
    "request_id", ["", " ", "a b", "a\r\nDEL x", "é", "a" * 201, "a\x00", "\ud800"]
)
def test_a_request_id_is_printable_and_short(request_id: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^id: "):
        check_request_id(request_id)


def test_usual_ids_pass() -> None:
    for request_id in ("0190f2b4-7c3e-7000-8000-000000000000", "a", "order:7/{x}", "~" * 200):
        assert check_request_id(request_id) == request_id
