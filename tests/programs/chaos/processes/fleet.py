"""Worker processes of a run: starts them, inflicts faults, and restarts them when they end."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.programs.chaos.audit.records import Ending, Queue
from tests.programs.chaos.processes.earlier import EARLIER_LOG, Release
from tests.programs.chaos.processes.group import ForkedMember, ProcessGroup, warm_up
from tests.support.fork_server import WORKER, ForkServer, fork_server
from tests.support.paths import ROOT
from tests.support.processes import family_of

LEASE_MS = 1000
MAX_CRASHES = dict.fromkeys(Queue, 1000) | {Queue.POISON: 4}
"""High, because a worker that is killed at random proves nothing, even about a request alone."""

CRASH_BACKOFF_MS = 200
"""How long a suspect waits after its second crash."""

_OPTIONS = {
    Queue.VOLUME: ["--model", "model-free", "--max-num-seqs", "8"],
    Queue.REAL: ["--dtype", "float32", "--max-num-seqs", "8", "--kv-cache-memory", "32M"],
    Queue.POISON: ["--model", "model-free", "--max-num-seqs", "4"],
    Queue.FIRST: [
        *["--model", "model-free", "--model", "model-free", "--queue", Queue.SECOND],
        *["--swap-least-seconds", "1", "--swap-longest-wait", "3", "--max-num-seqs", "8"],
        *["--drain-seconds", "0.3"],
    ],
    Queue.UPSTREAM: [],
}
OVERFLOW = "--overflow"
_WORKER = "tests.programs.chaos.processes.chaotic_worker"
_DRAIN_SECONDS = 2.0
_FAMILY = 4
_RESTART_SECONDS = 0.05


class Place:
    """A place in the fleet, where one worker process runs at a time. When the process ends, another
    one starts."""

    def __init__(
        self,
        queue: Queue,
        number: int,
        url: str,
        folder: Path,
        group: ProcessGroup,
        server: ForkServer,
        environment: Mapping[str, str],
        earlier: Release | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self.queue = queue
        self.name = f"{queue}-{number}"
        self.endings: list[Ending] = []
        """The ends of its processes."""
        self.is_ready = False
        self.is_frozen = False
        self.is_to_be_earlier = False
        """Whether the next process is of the earlier release."""
        self.is_earlier = False
        self._options = [*_OPTIONS[queue], *options]
        self.is_overflow = OVERFLOW in options
        self._url = url
        self._folder = folder
        self._earlier = earlier
        self._group = group
        self._server = server
        self._environment = environment
        self._process: ForkedMember | None = None
        self._sent: set[signal.Signals] = set()
        self._last_words = ""
        self._was_ready = False
        self._keeper: asyncio.Task[None] | None = None
        self._is_wanted = asyncio.Event()
        self._is_wanted.set()

    def want(self, is_wanted: bool) -> None:
        """Set whether a process should run here. If not, the current process drains, and no other
        one starts."""
        if is_wanted:
            self._is_wanted.set()
        else:
            self._is_wanted.clear()
            self.send(signal.SIGTERM)

    def start(self) -> None:
        self._keeper = asyncio.create_task(self._keep())

    @property
    def pid(self) -> int | None:
        """The process id; None while no process runs here."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def is_draining(self) -> bool:
        return signal.SIGTERM in self._sent

    def send(self, signal_number: signal.Signals) -> bool:
        """Send a signal to the process, if it is ready. Returns whether the signal was sent."""
        pid = self.pid  # which may be over at the next look
        if pid is None or not self.is_ready:
            return False
        try:
            os.kill(pid, signal_number)
        except ProcessLookupError:  # it has just died, and nobody has heard of it yet
            return False
        self._sent.add(signal_number)
        self.is_ready = self.is_ready and signal_number is not signal.SIGKILL
        return True

    def kill_model(self, rng: random.Random) -> bool:
        """Kill the process of one of the worker's two models. Returns False if these processes do
        not run."""
        # The worker, what forks, and the processes of the models, in this order.
        family = family_of(self.pid) if self.pid is not None else []
        if len(family) < _FAMILY:
            return False
        with suppress(ProcessLookupError):
            os.kill(rng.choice(family[-2:]), signal.SIGKILL)
        return True

    async def freeze(self, seconds: float) -> bool:
        """Stop the process for `seconds`, and then continue it. Returns False if no process could
        be stopped."""
        pid = self.pid
        if self.is_frozen or pid is None or not self.send(signal.SIGSTOP):
            return False
        self.is_frozen = True
        try:
            await asyncio.sleep(seconds)
        finally:
            self.is_frozen = False
            if self.pid == pid:  # it may have been killed meanwhile
                self.send(signal.SIGCONT)
        return True

    async def leave(self) -> None:
        """Do not restart the process when it ends."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def end(self) -> None:
        """Drain the process, and do not restart it."""
        await self.leave()
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(10 * _DRAIN_SECONDS):
                    await process.wait()
                code = process.returncode
            except TimeoutError:
                process.kill()
                await process.wait()
                code = None
            if self.is_ready:  # else it may not have had its say about signals yet
                self.endings.append(self._ending(code, is_last=True))

    async def _keep(self) -> None:
        while True:
            await self._is_wanted.wait()
            self._sent.clear()
            self._last_words = ""
            self._was_ready = False
            arguments = [
                *["--redis", self._url, "--queue", self.queue, "--redis-wait", "30"],
                *["--lease-ms", str(LEASE_MS), "--max-crashes", str(MAX_CRASHES[self.queue])],
                *["--drain-seconds", str(_DRAIN_SECONDS), "--log-format", "json"],
                *self._options,
            ]
            earlier = self._earlier if self.is_to_be_earlier else None
            self.is_earlier = earlier is not None
            if earlier is not None:
                self._process = earlier.start_worker(arguments, self._environment, self._group)
            else:
                environment = {**os.environ, **self._environment}
                command = ("-m", _WORKER, *arguments)
                self._process = self._group.fork(self._server, *command, cwd=ROOT, env=environment)
            await self._read(self._process)
            code = await self._process.wait()
            self.endings.append(self._ending(code))
            self.is_ready = False
            await asyncio.sleep(_RESTART_SECONDS)

    async def _read(self, process: ForkedMember) -> None:
        suffix = EARLIER_LOG if self.is_earlier else ".log"
        with (self._folder / f"{self.name}{suffix}").open("ab") as log:
            async for line in process.lines():
                if line.startswith(b"ready"):
                    self.is_ready = self._was_ready = True
                    is_wanted = self._is_wanted.is_set()
                    if self.is_earlier is not self.is_to_be_earlier or not is_wanted:
                        self.send(signal.SIGTERM)  # it was started before it was known
                if not line.startswith(b"{"):  # those are of its log
                    self._last_words = line.decode(errors="replace").strip()
                log.write(line)
                log.flush()

    def _ending(self, code: int | None, is_last: bool = False) -> Ending:
        sent = frozenset(self._sent)
        words = self._last_words
        return Ending(self.queue, code, sent, self._was_ready, words, is_last, self.is_earlier)


class Fleet:
    """All workers of a run. `environment` is added to the environment of the processes.

    `upstream` has the options of each worker that forwards. A `model` replaces the shipped model.
    """

    def __init__(
        self,
        counts: Mapping[Queue, int],
        url: str,
        folder: Path,
        group: ProcessGroup,
        environment: Mapping[str, str],
        earlier: Release | None = None,
        upstream: Sequence[Sequence[str]] = (),
        model: Path | None = None,
    ) -> None:
        further = {Queue.REAL: ["--model", str(model)]} if model else {}
        overflows = {} if earlier else {(Queue.VOLUME, 0): [OVERFLOW]}
        shared = (url, folder, group)
        self._servers = [fork_server(WORKER)]
        if earlier is not None:
            self._servers.append(earlier.server)
        self.places = [
            Place(
                *(queue, number, *shared, self._servers[0], environment, earlier),
                overflows.get((queue, number)) or further.get(queue, ()),
            )
            for queue, count in counts.items()
            for number in range(count)
        ]
        self.places += [
            Place(Queue.UPSTREAM, number, *shared, self._servers[0], environment, None, it)
            for number, it in enumerate(upstream)
        ]

    async def start(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(warm_up, it) for it in self._servers))
        for place in self.places:
            place.start()

    def share_with_earlier(self, share: float) -> None:
        """Give this share of each queue's workers to the earlier release, by draining workers."""
        for number, place in enumerate(self.places):
            wanted = number % 2 < 2 * share
            place.is_to_be_earlier = wanted
            if place.is_earlier is not wanted and not place.is_draining:
                place.send(signal.SIGTERM)

    def scale(self, queue: Queue, rng: random.Random) -> bool:
        """Change the number of the queue's workers, at least one, by draining or starting some.

        Returns whether the queue has workers in this run.
        """
        places = [place for place in self.places if place.queue is queue]
        if not places:
            return False
        wanted = rng.sample(places, rng.randint(1, len(places)))
        for place in places:
            place.want(place in wanted)
        return True

    def want_all(self) -> None:
        for place in self.places:
            place.want(True)

    def of(self, queue: Queue) -> list[Place]:
        """Returns the workers of a queue that faults can hit: ready, and not frozen."""
        return [
            place
            for place in self.places
            if place.queue is queue and place.is_ready and not place.is_frozen
        ]

    async def leave(self) -> None:
        await asyncio.gather(*(place.leave() for place in self.places))

    async def end(self) -> None:
        await asyncio.gather(*(place.end() for place in self.places))

    @property
    def telling(self) -> list[Place]:
        """Returns the places whose process sends heartbeats. A worker with several models does not
        send them itself. Leaves out overflow workers, too."""
        return [
            place
            for place in self.places
            if place.queue is not Queue.FIRST and not place.is_overflow
        ]

    def pids(self) -> dict[Queue, dict[str, int | None]]:
        """Returns, for each queue, the process id of each place in `telling`; None if no process
        runs there."""
        found: dict[Queue, dict[str, int | None]] = {place.queue: {} for place in self.places}
        for place in self.telling:
            found[place.queue][place.name] = place.pid
        return found

    @property
    def endings(self) -> list[Ending]:
        """Returns the ends of all processes so far."""
        return [ending for place in self.places for ending in place.endings]

    def ends(self, queue: Queue) -> Counter[str]:
        """Returns how many processes of this queue have ended for each reason."""
        return Counter(ending.reason for ending in self.endings if ending.queue is queue)
