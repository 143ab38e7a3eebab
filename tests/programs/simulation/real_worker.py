"""The worker command with the engine of a world's worker, whose steps take real time. The command
has the options of `promptq worker`."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.__main__ import main as run_command
from promptq.worker.engine.core.model_free import ModelFreeStep
from promptq.worker.engine.core.runner import SampledToken
from promptq.worker.serve import process
from promptq.worker.serve.build import Served, build
from tests.programs.simulation.engine import CountingRunner, engine_of
from tests.programs.simulation.processes import BLOCK_SIZE, SIZES

SLOWNESS = 10
"""How many times as long as a measured step each step takes: so long that the rest of the worker
takes little time beside the step, even on a busy machine."""


class SleepingRunner(CountingRunner):
    """Sleeps in each step as long as a step of a world takes."""

    def collect(self, launched: ModelFreeStep) -> list[list[SampledToken]]:
        time.sleep(self.seconds_of_step(SLOWNESS, random.Random()))
        return super().collect(launched)


def build_sleeping(settings: WorkerSettings, *rest: Any) -> Served:
    """Builds the engine, in place of `promptq.worker.serve.build.build`."""
    num_slots, num_blocks = SIZES[0]
    runner = SleepingRunner(num_blocks, BLOCK_SIZE)
    return replace(build(settings, *rest), engine=engine_of(runner, num_slots))


if __name__ == "__main__":
    process.build = build_sleeping
    run_command()
