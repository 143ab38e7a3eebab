"""Builds the programs' environments, each in a separate folder, one after another."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

from tests.programs.compat.catalogue import Program
from tests.programs.package import building
from tests.support.paths import ROOT

CACHE = ROOT / ".cache" / "compat"
_SECONDS = 1800


def build(program: Program) -> str:
    """Build a program's environment, unless it exists. Returns the error if the build fails,
    otherwise an empty text."""
    folder = CACHE / program.name
    mark, wanted = folder / "built", "\n".join(program.pins)
    if mark.exists() and mark.read_text() == wanted:
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"{program.name}: installing {' '.join(program.pins)}", file=sys.stderr, flush=True)
    commands = _node(folder, program) if program.is_node else _python(folder, program)
    for command in commands:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
        if done.returncode:
            (folder / "failed").write_text(done.stdout + done.stderr)
            return (done.stderr.strip() or done.stdout.strip()).splitlines()[-1]
    mark.write_text(wanted)
    return ""


def _python(folder: Path, program: Program) -> list[list[str]]:
    install = ["-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    commands = [[sys.executable, "-m", "venv", str(folder / "venv")]]
    if program.pins:
        commands.append([str(folder / "venv/bin/python"), *install, *program.pins])
    return commands


def _node(folder: Path, program: Program) -> list[list[str]]:
    install = ["--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder)]
    return [["npm", "install", *install, *program.pins]]


def build_promptq(wheel: Path | None) -> Path:
    """Returns the interpreter of an environment with the wheel and all extras, like a user's.
    Without a `wheel`, builds the wheel first."""
    folder = CACHE / "promptq"
    if wheel is None:
        shutil.rmtree(folder / "dist", ignore_errors=True)
        wheel = building.build(folder / "dist")
    python, mark = folder / "venv/bin/python", folder / "built"
    constraints = (ROOT / "constraints.txt").read_bytes() + (ROOT / "pyproject.toml").read_bytes()
    wanted = hashlib.sha256(constraints).hexdigest()
    if mark.exists() and mark.read_text() == wanted:  # only the package itself is another one
        install = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
        command = [sys.executable, *install, "--force-reinstall", str(wheel)]
        subprocess.run(command, check=True)
        return python
    shutil.rmtree(folder / "venv", ignore_errors=True)
    python = building.install(folder / "venv", wheel, "all", newest=False)
    mark.write_text(wanted)
    return python


_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


def leave_network() -> None:
    """Remove all network but loopback from this process and the processes that it starts. If the
    system refuses, print a message and keep the network."""
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        why = os.strerror(ctypes.get_errno())
        print(
            f"the programs have the whole network, because unshare failed: {why}", file=sys.stderr
        )
        return
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP))
