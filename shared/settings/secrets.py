"""Removes secrets from the environment of a process that has read its settings."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

from promptq.shared.settings.common import ENV_PREFIX

_SECRETS = (
    *("REDIS_URL", "JOBS_REDIS_URL", "UPSTREAM_KEY"),
    *("WEBHOOK_MASTER_SECRET", "WEBHOOK_SECRET"),
)


def forget_secrets() -> None:
    """Removes secrets from the environment, which child processes inherit, and from the text of
    `/proc/self/environ`. That file shows the memory in which the process got its environment, even
    after a variable was removed, so this function overwrites the memory."""
    names = [name for secret in _SECRETS if (name := ENV_PREFIX + secret) in os.environ]
    with suppress(ValueError, OSError):  # a C library without `environ`
        entries = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")
        index = 0
        while (address := entries[index]) is not None:
            variable, _, value = ctypes.string_at(address).partition(b"=")
            if os.fsdecode(variable) in names:
                ctypes.memset(address + len(variable) + 1, ord("-"), len(value))
            index += 1
    for name in names:
        del os.environ[name]
