"""Chooses the webhook to call next. Each running call occupies one of a limited number of places.

Tenants take turns, and each tenant's receivers take turns. A call begins only if the free places
outnumber the sum of its tenant's places and its receiver's places (a dynamic threshold: A.
Choudhury and E. Hahne, Dynamic Queue Length Thresholds for Shared-Memory Packet Switches, 1998). So
a tenant with one slow receiver occupies about a third of all places, and a tenant with many
receivers about half. Other tenants still find free places.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable


class Turns:
    """The webhooks that are due, by tenant and receiver, and those that are being called.

    A call occupies a place. A receiver is None until the webhook's URL was read. Thread-safe.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._due: dict[str, dict[str | None, deque[str]]] = {}
        self._held: dict[str, tuple[str, str | None]] = {}
        """Tenant and receiver of each webhook that is being called, by request id."""

    def add(self, request_id: str, tenant: str, receiver: str | None) -> None:
        """Adds a webhook that is due."""
        with self._lock:
            self._due.setdefault(tenant, {}).setdefault(receiver, deque()).append(request_id)

    def forget_due(self) -> None:
        """Forgets the webhooks that are due, but not those that are being called."""
        with self._lock:
            self._due.clear()

    def take(self) -> str | None:
        """Returns the request id of the webhook to call next; None if no call may begin. The call
        occupies a place until `give_back`."""
        with self._lock:
            may_begin = self._room()
            for tenant, by_receiver in self._due.items():
                for receiver, waiting in by_receiver.items():
                    if may_begin(tenant, receiver):
                        request_id = waiting.popleft()
                        self._to_the_end(tenant, receiver)
                        self._held[request_id] = (tenant, receiver)
                        return request_id
            return None

    def name_receiver(self, request_id: str, receiver: str) -> bool:
        """Sets the receiver of a taken webhook. Returns whether its call may begin."""
        with self._lock:
            tenant, known = self._held.pop(request_id)
            may_begin = known == receiver or self._room()(tenant, receiver)
            self._held[request_id] = (tenant, receiver)
            return may_begin

    def give_back(self, request_id: str) -> None:
        with self._lock:
            del self._held[request_id]

    def _room(self) -> Callable[[str, str | None], bool]:
        """Returns a function that says whether a call of a tenant to a receiver may begin now."""
        num_free = self._places - len(self._held)
        of_tenant = Counter(tenant for tenant, _ in self._held.values())
        of_receiver = Counter(held for held in self._held.values() if held[1] is not None)
        return lambda tenant, receiver: of_tenant[tenant] + of_receiver[tenant, receiver] < num_free

    def _to_the_end(self, tenant: str, receiver: str | None) -> None:
        by_receiver = self._due.pop(tenant)
        waiting = by_receiver.pop(receiver)
        if waiting:
            by_receiver[receiver] = waiting
        if by_receiver:
            self._due[tenant] = by_receiver
