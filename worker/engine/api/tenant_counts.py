"""Counts things by tenant."""

from __future__ import annotations


class TenantCounts(dict[str, int]):
    """Counts by tenant. A tenant that has none is not in it."""

    def add(self, tenant: str) -> None:
        self[tenant] = self.get(tenant, 0) + 1

    def remove(self, tenant: str) -> None:
        self[tenant] -= 1
        if not self[tenant]:
            del self[tenant]
