"""The command as people run it, as tests/producer has it."""

from __future__ import annotations

from tests.producer.conftest import environment, own_worker, redis_url, run, start

__all__ = ["environment", "own_worker", "redis_url", "run", "start"]
