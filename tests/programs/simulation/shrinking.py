"""Shrinks the plan of a world that breaks a promise, so that its log is short."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from tests.programs.simulation.plan import Fault, Plan, PlannedFault


def shrink(plan: Plan, still_fails: Callable[[Plan], bool]) -> Plan:
    """Returns a plan with fewer faults, requests, clients and workers that still fails."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(plan):
            if still_fails(candidate):
                plan, smaller = candidate, True
                break
    return plan


def _candidates(plan: Plan) -> Iterator[Plan]:
    """Yields smaller plans, those that leave out most first."""
    if plan.num_workers > 1:
        yield replace(plan, num_workers=1)
    if plan.num_clients > 1:
        yield replace(plan, num_clients=1)
    if plan.num_gateways:
        yield replace(plan, num_gateways=plan.num_gateways - 1)
    if plan.num_leaders:
        yield replace(plan, num_leaders=plan.num_leaders - 1)
    for name in ("affinity_ms", "shortest_first_ms"):
        if getattr(plan, name):
            yield replace(plan, **{name: 0})
    for part in (2, 4, 8):
        if (num_requests := plan.num_requests - plan.num_requests // part) < plan.num_requests:
            yield replace(plan, num_requests=num_requests)
    size = len(plan.faults)
    while size:
        for start in range(0, len(plan.faults), size):
            yield replace(plan, faults=plan.faults[:start] + plan.faults[start + size :])
        size //= 2


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan to a file, as JSON."""
    path.write_text(json.dumps(asdict(plan), indent=1) + "\n")


def read_plan(path: Path) -> Plan:
    """Returns the plan in a file. Raises ValueError, with one sentence, if the file has none."""
    try:
        fields = json.loads(path.read_text())
        faults = [
            PlannedFault(**{**fault, "kind": Fault(fault["kind"])}) for fault in fields["faults"]
        ]
        plan = Plan(**{**fields, "faults": tuple(faults)})
        counts = plan.num_workers, plan.num_clients, plan.num_requests
        counts += plan.lease_ms, plan.aging_ms, plan.num_gateways + 1, plan.num_leaders + 1
        counts += plan.affinity_ms + 1, plan.shortest_first_ms + 1, plan.log_ttl_ms
        if not all(type(count) is int and count >= 1 for count in counts):
            raise ValueError("it has a count that is too small")
        times = [plan.seconds]
        for fault in plan.faults:
            times += [fault.at, fault.choice, fault.seconds]
        if any(type(time) not in (int, float) or not 0 <= time < math.inf for time in times):
            raise ValueError("it has a time that is no number")
        if type(plan.seed) is not int or any(fault.choice >= 1 for fault in plan.faults):
            raise ValueError("its seed is no whole number, or a choice is not below 1")
        return plan
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is no plan of a world: {error!r}") from error
