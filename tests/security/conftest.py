"""The command, and a worker played by hand."""

from tests.producer.conftest import environment, own_worker, run, start

__all__ = ["environment", "own_worker", "run", "start"]
