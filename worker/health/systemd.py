"""Notifies systemd that the worker has started, is alive, or stops. See sd_notify(3)."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

_ADDRESS = "NOTIFY_SOCKET"
_WATCHDOG = "WATCHDOG_USEC"
_MESSAGES_PER_LIMIT = 3


def notify(state: str) -> None:
    """Send a state, such as READY=1, to systemd. Does nothing if no service manager listens."""
    address = os.environ.get(_ADDRESS)
    if not address:
        return
    if address.startswith("@"):  # an abstract name, which begins with a zero byte
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
        sending.sendto(state.encode(), address)


def watchdog_seconds() -> float | None:
    """Returns the seconds between two WATCHDOG=1 messages; None if systemd expects none."""
    microseconds = os.environ.get(_WATCHDOG, "")
    if not microseconds.isdigit() or not os.environ.get(_ADDRESS):
        return None
    return int(microseconds) / 1e6 / _MESSAGES_PER_LIMIT
