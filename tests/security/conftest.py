"""The command as strangers run it, as tests/producer has it."""

from __future__ import annotations

from tests.producer.conftest import environment, run, start

__all__ = ["environment", "run", "start"]
