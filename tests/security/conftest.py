"""The command as people run it, as tests/producer has it, and a queue, as tests/worker has it."""

from __future__ import annotations

from tests.producer.conftest import environment, own_worker, redis_url, run, start
from tests.worker.conftest import queue

__all__ = ["environment", "own_worker", "queue", "redis_url", "run", "start"]
