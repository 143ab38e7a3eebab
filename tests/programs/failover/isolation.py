"""Machines of a small network, each a network namespace on one bridge. A machine can be cut off:
then its programs reach only one another, as in a real partition.

Where network namespaces are not allowed, a machine is only an address of this computer. Then a
primary that is cut off refuses the connections of all users but NEAR.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_INSIDE = "PROMPTQ_TESTS_ISOLATED"
_NET = "10.77.0"
NEAR = "near"
"""The server's user for programs on the primary's machine."""
HERE = f"{_NET}.254"
"""The address of this program, which is a machine of the network too."""


def isolate() -> None:
    """Start this program again in a network without a way out. Does nothing if the program already
    runs there, or if this computer allows no network namespaces."""
    if is_isolated():
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "switch", "type", "bridge")
        _run("ip", "address", "add", f"{HERE}/24", "dev", "switch")
        _run("ip", "link", "set", "switch", "up")
        return
    enter = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.getuid():
        enter.append("--map-root-user")
    if subprocess.run([*enter, "true"], capture_output=True, check=False).returncode:
        print("This machine allows no network namespaces, so it runs no partitions of a Cluster.")
        return
    command = [*enter, sys.executable, "-m", "tests.programs.failover", *sys.argv[1:]]
    os.execvpe(enter[0], command, {**os.environ, _INSIDE: "1"})  # noqa: S606


class Machine:
    """A machine of the network: an address, and the programs that run there."""

    def __init__(self, number: int) -> None:
        self.address = f"127.77.0.{number}"
        self._processes: list[subprocess.Popen[str]] = []
        self._within: list[str] = []

    def start(
        self, command: Sequence[str | Path], log: Path, **environment: str
    ) -> subprocess.Popen[str]:
        """Start a program on this machine. Its output goes to the file `log`."""
        with log.open("a") as output:
            process = subprocess.Popen(
                [*self._within, *map(str, command)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                env={**os.environ, **environment},
            )
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End all programs of the machine."""
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


class NetworkMachine(Machine):
    """A machine that is a network namespace, and can be cut off."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.address = f"{_NET}.{number}"
        self._cable = f"cable{number}"
        self._keeper = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], text=True)
        self._processes.append(self._keeper)
        self._within = ["nsenter", "--net", f"--target={self._keeper.pid}"]
        mine = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{self._keeper.pid}/ns/net") == mine:
            time.sleep(0.005)
        far_end = ("peer", "name", "eth0", "netns", str(self._keeper.pid))
        _run("ip", "link", "add", self._cable, "type", "veth", *far_end)
        _run("ip", "link", "set", self._cable, "master", "switch", "up")
        for command in (
            ("ip", "link", "set", "lo", "up"),
            ("ip", "address", "add", f"{self.address}/24", "dev", "eth0"),
            ("ip", "link", "set", "eth0", "up"),
        ):
            _run(*self._within, *command)

    def unplug(self) -> None:
        _run("ip", "link", "set", self._cable, "down")

    def plug_in(self) -> None:
        _run("ip", "link", "set", self._cable, "up")

    def close(self) -> None:
        super().close()
        # The cable ends with the namespace, perhaps a moment later.
        subprocess.run(["ip", "link", "delete", self._cable], check=False, capture_output=True)


def new_machine(number: int) -> Machine:
    return NetworkMachine(number) if is_isolated() else Machine(number)


def is_isolated() -> bool:
    """Whether this program runs in a network without a way out."""
    return _INSIDE in os.environ


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
