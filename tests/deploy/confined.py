"""`python -m tests.deploy.confined UNIT COMMAND`: runs a command within a unit's system calls.

systemd itself is needed for all else that a unit forbids, and does not run where tests do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))


def settings(unit: Path, name: str) -> list[str]:
    """The values of all lines with this name."""
    return re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)


_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_PR_SET_MDWE, _REFUSE_EXECUTABLE = 65, 1


def calls_of(group: str) -> set[str]:
    """The system calls of a group's name, such as @system-service, as systemd lists them."""
    if not group.startswith("@"):
        return {group}
    listed = subprocess.run(
        ["systemd-analyze", "syscall-filter", group], capture_output=True, text=True, check=True
    )
    [_, *lines] = (line.strip() for line in listed.stdout.splitlines())
    return {call for line in lines if line and line[0] != "#" for call in calls_of(line)}


def allowed_calls(unit: Path) -> set[str]:
    allowed: set[str] = set()
    for group in settings(unit, "SystemCallFilter"):
        if group.startswith("~"):
            allowed -= calls_of(group[1:])
        else:
            allowed |= calls_of(group)
    return allowed


def confine(unit: Path) -> None:
    """Hold this process and what it starts to the unit's calls; the others fail with EPERM."""
    assert settings(unit, "SystemCallErrorNumber") == ["EPERM"]
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint32(_ERROR | errno.EPERM)))
    for call in sorted(allowed_calls(unit)):
        number = seccomp.seccomp_syscall_resolve_name(call.encode())
        if number != -1:  # a newer systemd may list calls that an older library does not know
            seccomp.seccomp_rule_add(rules, ctypes.c_uint32(_ALLOW), number, 0)
    assert seccomp.seccomp_load(rules) == 0
    if settings(unit, "MemoryDenyWriteExecute") == ["yes"]:
        ctypes.CDLL(None).prctl(_PR_SET_MDWE, _REFUSE_EXECUTABLE, 0, 0, 0)  # since Linux 6.3


if __name__ == "__main__":
    confine(Path(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606
