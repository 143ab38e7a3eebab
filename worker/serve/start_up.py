"""Measures the stages of a worker's start, and shows them in a terminal or as log lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from promptq.shared.runtime.logs import get_logger

_LOGGED_SECONDS = 5.0  # without a bar, a stage that takes this long gets a log line


class StartUp:
    """Shows and measures the stages of a start. Implements `Progress` for `build`.

    The thread that loads the model reports stages. Call `close` also after a failed start.
    """

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds: dict[str, float] = {}
        """The seconds of each stage, by its name, in order."""
        self._clock = clock
        self._logged: set[str] = set()
        self._stage: str | None = None
        self._began_at = 0.0
        self._log = get_logger()
        console = console or Console(file=sys.stderr)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
        self._bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._is_shown = console.is_terminal
        self._task = self._bar.add_task("starting", total=None)

    def __call__(self, stage: str, share: float | None = None) -> None:
        if stage != self._stage:
            if self._stage is None and self._is_shown:
                self._bar.start()
            self._end_stage()
            self._stage, self._began_at = stage, self._clock()
        total = None if share is None else 1.0
        self._bar.update(self._task, description=stage, total=total, completed=share or 0.0)

    def close(self) -> None:
        """End the last stage, and remove the progress bar from the terminal."""
        self._end_stage()
        if self._is_shown:
            self._bar.stop()

    def __str__(self) -> str:
        """Returns the times of unlogged stages, such as `weights 0.8 s, checking 1.2 s`."""
        stages = self.seconds.items()
        return ", ".join(
            f"{name} {took:.1f} s" for name, took in stages if name not in self._logged
        )

    def _end_stage(self) -> None:
        if self._stage is None:
            return
        seconds = self._clock() - self._began_at
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + seconds
        if seconds >= _LOGGED_SECONDS and not self._is_shown:
            self._logged.add(self._stage)
            self._log.info("starting", stage=self._stage, seconds=round(seconds, 1))
        self._stage = None
