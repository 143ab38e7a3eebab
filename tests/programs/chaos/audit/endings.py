"""Why a worker process ended, and which of these ends a run allows."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from tests.programs.chaos.audit.records import Queue
from tests.programs.chaos.processes.chaotic_worker import POISONED_CODE

_NO_SERVER = "promptq worker: no Redis server answers at "
"""A worker that serves tries for a minute, longer than any fault; one that starts says this."""

ALLOWED = {
    "killed",
    "poisoned",
    "drained, exit code 0",
    "drained by the last release, exit code -15",
    "met no server as it started",
    "exit code 0 at the end",
}
"""All that a schedule and its requests cause; whatever else ends a worker is a violation."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How one worker process ended."""

    queue: Queue
    code: int | None
    """-n if signal n ended it; None if it had to be killed as it did not drain."""
    sent: frozenset[signal.Signals] = frozenset()
    """What the run had sent it."""
    was_ready: bool = True
    last_words: str = ""
    is_last: bool = False
    """The run was over, and all were told to end."""
    is_earlier: bool = False
    """It was of the last release, which a SIGTERM kills that comes while its interpreter ends. This
    release ignores it then."""

    @property
    def reason(self) -> str:
        if self.is_earlier and self.code == -signal.SIGTERM and signal.SIGTERM in self.sent:
            return "drained by the last release, exit code -15"
        if self.is_last:
            if self.code is None:
                return "did not drain at the end"
            return f"exit code {self.code} at the end"
        if self.code == -signal.SIGKILL and signal.SIGKILL in self.sent:
            return "killed"
        if self.code == POISONED_CODE and self.queue is Queue.POISON:
            return "poisoned"
        if signal.SIGTERM in self.sent:
            return f"drained, exit code {self.code}"
        if self.code == 1 and not self.was_ready and self.last_words.startswith(_NO_SERVER):
            return "met no server as it started"
        return f"by itself, exit code {self.code}"
