"""Broken gateways, jobs, order and restarts. To find such a mutant, a world needs the broken part.

`test_parts.py` has a plan of a world for each mutant.
"""

from __future__ import annotations

from tests.programs.simulation.breaking import Mutant

_ROUTE = "promptq.producer.apis.completions.route"
_DISPATCHER = "promptq.producer.jobs.batch_dispatcher"


def _lua(old: str, new: str) -> Mutant:
    """Returns a mutant that has `new` in place of `old` in all scripts."""
    read = 'text = (_LUA / f"{file}.lua").read_text()'
    return Mutant("promptq.shared.queue.call", read, f"{read}.replace({old!r}, {new!r})")


PART_MUTANTS = {
    "gateway-keeps-abandoned-requests": Mutant(
        "promptq.producer.http.disconnects", "if not answer.detach:", "if False:"
    ),
    "gateway-resumes-at-the-beginning": Mutant(
        _ROUTE,
        "have = have or [Position()] * completion.num_choices",
        "have = [Position()] * completion.num_choices",
    ),
    "gateway-ends-twice": Mutant(
        _ROUTE,
        "await self._out.write_all(_DONE)",
        "await self._out.write_all(_DONE + _DONE)",
    ),
    "everybody-leads": _lua("if held_by and held_by ~= holder then return 0 end", ""),
    "nobody-asks-for-the-lead": Mutant(
        _DISPATCHER, "return self._lead_for(_LEADER_MS)", "return True"
    ),
    "dead-leader-stays": Mutant(_DISPATCHER, "_LEADER_MS = 5000", "_LEADER_MS = 500_000"),
    "upkeep-runs-once": Mutant(
        "promptq.producer.jobs.leader",
        "due[seconds, job] = now + seconds",
        "due[seconds, job] = now + 1000",
    ),
    "idempotency-keys-are-forgotten": _lua("'payload') == 1 and id\n", "'payload') == 7 and id\n"),
    "large-requests-are-passed": _lua("local MAX_PASSES = 8 ", "local MAX_PASSES = 800 "),
    "preferred-requests-pass-for-ever": _lua(
        "local MOST_OVERTAKING = 32 ", "local MOST_OVERTAKING = 3200 "
    ),
    "requests-are-left-for-long": _lua("math.min(ms, MAX_WAIT_MS)", "MAX_WAIT_MS"),
    "short-requests-pass-for-long": _lua("return most_ms() * (", "return 3 * most_ms() * ("),
    "cancelled-sequence-stays": Mutant(
        "promptq.worker.engine.core.llm_engine",
        "        self._release(sequence)\n        self._check_integrity_when_idle()\n",
        "",
    ),
}
