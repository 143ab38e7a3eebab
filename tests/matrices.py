"""Tests of many cases that take long: a run takes a sample of them, and `--whole` takes all.

`@pytest.mark.matrix(3)` on a test with parameters: three of its cases, others at each run. A run
tells its seed at its end, and `--sample-seed` gives the same sample again.
"""

from __future__ import annotations

import random
from collections import defaultdict

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="all cases of matrices, not a sample")
    parser.addoption("--sample-seed", type=int, help="of the sample")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "matrix(cases): so many of the cases are a run's sample")
    if config.option.sample_seed is None:  # before the processes of xdist get the options
        config.option.sample_seed = random.randrange(10**6)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not config.option.whole:
        seed = config.option.sample_seed
        terminalreporter.write_line(f"samples of matrices: --sample-seed {seed}; all: --whole")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.whole:
        return
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("matrix"):
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out = set[pytest.Item]()
    for name, those in cases.items():
        marker = those[0].get_closest_marker("matrix")
        assert marker is not None
        count = min(len(those), *marker.args)
        chosen = random.Random(f"{config.option.sample_seed} {name}").sample(those, count)
        left_out.update(item for item in those if item not in chosen)
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
