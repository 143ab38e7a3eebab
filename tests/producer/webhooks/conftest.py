"""A receiver of webhooks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.producer.webhooks.receiving import Receiver, receiver


@pytest.fixture
def receiving() -> Iterator[Receiver]:
    with receiver() as found:
        yield found
