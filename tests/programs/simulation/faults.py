"""Inflicts the planned faults on the processes, connections and server of a world."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tests.programs.simulation.fleet import Fleet
from tests.programs.simulation.loop import Process
from tests.programs.simulation.notes import Disturbance
from tests.programs.simulation.places import Place, Site, running
from tests.programs.simulation.plan import Fault, PlannedFault
from tests.programs.simulation.server import SteppedServer

_REPORT_SECONDS = 0.05


class Faults:
    """The faults of a world. A fault selects its process or connection when it happens."""

    def __init__(self, site: Site, fleet: Fleet, server: SteppedServer) -> None:
        self._site = site
        self._fleet = fleet
        self._server = server

    def inflict(self, planned: PlannedFault) -> None:
        """Let a fault happen now."""
        match planned.kind:
            case Fault.KILL | Fault.KILL_GATEWAY | Fault.KILL_CLIENT | Fault.KILL_JOBS:
                place = self._choose(self._places_of(planned.kind), planned)
                for process in running([place]):
                    self._record(planned.kind, process, seconds=0.0)
                place.kill(planned.seconds)
            case Fault.DRAIN | Fault.DRAIN_GATEWAY:
                place = self._choose(self._places_of(planned.kind), planned)
                for process in running([place]):
                    self._note(planned, process)
                place.drain()
            case Fault.FREEZE | Fault.FREEZE_GATEWAY | Fault.FREEZE_CLIENT | Fault.FREEZE_JOBS:
                for process in running([self._choose(self._places_of(planned.kind), planned)]):
                    self._freeze(planned, process)
            case Fault.RESTART | Fault.OUTAGE:
                if self._server.process.is_running:
                    self._note(planned, self._server.host)
                    self._server.restart(planned.seconds)
            case Fault.DISK_FULL:
                self._note(planned, self._server.host)
                self._server.full_until = self._site.loop.now + planned.seconds
            case Fault.LOSE_MESSAGES:
                if links := self._server.subscribed_links:
                    link = self._choose(links, planned)
                    self._note(planned, link.near.process)
                    link.swallows_messages_until = self._site.loop.now + planned.seconds
            case Fault.FALSE_CANCELS:
                self._note(planned, self._server.host)
                self._site.loop.root.start(self._report_cancels(planned.seconds))
            case Fault.CUT_ONE | Fault.LOSE_REPLY:
                if links := self._site.network.links:
                    link = self._choose(links, planned)
                    self._note(planned, link.near.process)
                    if planned.kind is Fault.CUT_ONE:
                        link.cut()
                    else:
                        link.swallows_replies = True
            case _:
                if processes := running(self._fleet.places):
                    self._disturb(planned, self._choose(processes, planned))

    def _places_of(self, kind: Fault) -> Sequence[Place[Any]]:
        """Returns the places of a kind of processes; of workers if a shrunk plan lacks the kind."""
        match kind:
            case Fault.KILL_CLIENT | Fault.FREEZE_CLIENT:
                return self._fleet.clients
            case Fault.KILL_GATEWAY | Fault.DRAIN_GATEWAY | Fault.FREEZE_GATEWAY:
                return self._fleet.gateways or self._fleet.workers
            case Fault.KILL_JOBS | Fault.FREEZE_JOBS:
                return self._fleet.jobs or self._fleet.workers
        return self._fleet.workers

    def _disturb(self, planned: PlannedFault, process: Process) -> None:
        network = self._site.network
        self._note(planned, process)
        match planned.kind:
            case Fault.CUT:
                for link in network.of(process):
                    link.cut()
            case Fault.HOLD:
                network.hold(process, planned.seconds)
            case Fault.REFUSE:
                network.refuse(process, planned.seconds)
            case Fault.JUMP:
                process.wall_ahead += (planned.choice - 0.5) * 100

    async def _report_cancels(self, seconds: float) -> None:
        """Publishes messages that any client may send, about requests that are not cancelled."""
        end = self._site.loop.now + seconds
        while self._site.loop.now < end:
            self._server.report_cancels()
            await asyncio.sleep(_REPORT_SECONDS)

    def _freeze(self, planned: PlannedFault, process: Process) -> None:
        loop = self._site.loop
        self._note(planned, process)
        process.pause()
        loop.at(loop.now + planned.seconds, loop.root, process.go_on)

    def _note(self, planned: PlannedFault, process: Process) -> None:
        self._record(planned.kind, process, planned.seconds)
        self._site.trace.note(process, f"suffers: {planned.kind} ({planned.seconds:.3f} s)")

    def _record(self, kind: Fault, process: Process, seconds: float) -> None:
        begin = self._site.loop.now
        disturbance = Disturbance(kind, process.name, begin, begin + seconds)
        self._site.notes.disturbances.append(disturbance)

    def _choose(self, items: Sequence[Any], planned: PlannedFault) -> Any:
        return items[int(planned.choice * len(items))]
