"""Counts by tenant, for example of running requests."""

from __future__ import annotations


class TenantCounts(dict[str, int]):
    """The count of each tenant. A tenant with a count of 0 has no entry."""

    def add(self, tenant: str) -> None:
        self[tenant] = self.get(tenant, 0) + 1

    def remove(self, tenant: str) -> None:
        self[tenant] -= 1
        if not self[tenant]:
            del self[tenant]
