"""A process that says that it loads models, but only notes down what it is told."""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from promptq.shared.settings.common import Settings
from promptq.worker.swapping.standby import Order, Report


def pretend(notes: Path, settings: Settings, _redis_url: str, owner: Connection) -> None:
    """The model `large` has room alone only, and `broken` does not load."""

    def note(what: str) -> None:
        with notes.open("a") as file:
            file.write(f"{settings.queue} {what}\n")

    def report(what: Report, text: str = "") -> None:
        note(what)
        owner.send((what, text, None))

    report(Report.REGISTERED)
    while True:
        try:
            order, _ = owner.recv()
        except EOFError:
            return
        note(order)
        if order in (Order.DRAIN, Order.STOP):
            time.sleep(0.05)
            note("ends")
            return
        if settings.model == "broken":
            report(Report.FAILED, "it is broken")
            sys.exit(1)
        time.sleep(0.2)  # loading takes longer than what else may happen at once
        is_large = settings.model == "large" and order is Order.LOAD
        report(Report.NO_ROOM if is_large else Report.SERVING)
