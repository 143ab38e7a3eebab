"""Python code that runs for too long is ended, whatever it catches."""

from __future__ import annotations

import pytest

from promptq.worker.text.template_time_limit import CpuTimeLimitError, cpu_time_limit


def step() -> None:
    for _ in range(10_000):
        pass


def run_for_ever() -> None:
    while True:
        try:
            step()
        except Exception:  # noqa: S112 # as libraries do
            continue


def test_the_limit_ends_code_that_catches_every_exception() -> None:
    with pytest.raises(CpuTimeLimitError), cpu_time_limit(0.01):
        run_for_ever()
