"""Service tiers are bands of priorities; completion windows are deadlines."""

from __future__ import annotations

from typing import Any

import pytest

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.request import Request
from promptq.shared.protocol.urgency import tier_of


def test_priorities_belong_to_tiers() -> None:
    tiers = [tier_of(priority) for priority in (-1000, -10, -9, 0, 9, 10, 1000)]
    assert tiers == [
        *("priority", "priority", "default", "default"),
        *("default", "flex", "flex"),
    ]


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({"service_tier": "priority"}, -10),
        ({"service_tier": "flex"}, 10),
        ({"service_tier": "auto"}, 0),
        ({"service_tier": "standard_only"}, 0),
        ({"service_tier": "flex", "priority": 0}, 0),
        ({"service_tier": "priority", "priority": 3}, 3),
    ],
)
def test_a_tier_sets_the_priority_unless_the_request_has_one(
    fields: dict[str, Any], priority: int
) -> None:
    request = Request.build({"prompt": "a", **fields})
    assert request.priority == priority
    again = Request.parse(request.to_payload())
    assert again.priority == priority, "a payload must not set the tier's priority once more"


@pytest.mark.parametrize(
    ("fields", "deadline_ms"),
    [
        ({"completion_window": "90m"}, 5_400_000),
        ({"completion_window": "24h"}, 86_400_000),
        ({"completion_window": "1m", "deadline_ms": 500}, 500),
        ({"completion_window": "1m", "deadline_ms": 61_000}, 60_000),
    ],
)
def test_a_window_limits_the_deadline(fields: dict[str, Any], deadline_ms: int) -> None:
    request = Request.build({"prompt": "a", **fields})
    assert request.deadline_ms == deadline_ms
    assert Request.parse(request.to_payload()) == request


@pytest.mark.parametrize("window", ["", "2", "0h", "-1h", "2 h", "2d", "10000h", "2h\n"])
def test_other_windows_are_refused(window: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^completion_window: .*such as 90m or 2h"):
        Request.build({"prompt": "a", "completion_window": window})
