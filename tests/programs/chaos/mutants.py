"""Scripts broken in one place each: a run with one of them must find violations.

Those that the exploration of states has too are taken from there.
"""

from __future__ import annotations

import os

from promptq.shared.queue import request_queue
from tests.programs.states.mutants import mutants as states
from tests.programs.states.mutants.mutant import ALL_SCRIPTS, Mutant

VARIABLE = "PROMPTQ_CHAOS_MUTANT"
"""In the environment of a run's workers and clients: the mutant whose scripts they send."""


def _of_states(script: str, old: str) -> Mutant:
    """The first that breaks this script where it says `old`."""
    return next(it for it in states.MUTANTS if it.script == script and old in it.old)


MUTANTS = {
    "lost-fence": _of_states("publish", "request.fence ~= fence"),
    "rows-anywhere": Mutant(  # the position of a row that came before is not checked
        "an_answer_to_a_row_is_true",
        "publish",
        "if not status and index ~= request.count then",
        "if not status and index > request.count then",
    ),
    "rows-after-the-end": _of_states("publish", "request.finished then"),
    "cancel-ignored": _of_states("publish", "request.cancelled or"),
    "deadline-ignored": _of_states("publish", "request.expired) then"),
    "log-trimmed": _of_states("publish", "keys.tokens(id), count"),
    "claim-without-lease": _of_states("claim", "server.for_all"),
    "attempts-not-counted": _of_states("claim", "local attempt"),
    "resume-refused": _of_states("claim", "is_newer(fields.payload)"),
    "early-reap": Mutant(  # hands out what is held by somebody whose lease has not run out
        "only_the_newest_attempt_writes",
        "reap",
        "server.due(keys.leases, server.now_text,",
        "server.due(keys.leases, '+inf',",
    ),
    "no-reap": _of_states("reap", "server.due(keys.leases"),
    "cancel-drops-leases": _of_states("cancel", "if mode ~= 'any' then"),
    "finish-keeps-holds": _of_states(ALL_SCRIPTS, "keys.leases, keys.deadlines, keys.delayed}"),
    "finish-without-state": _of_states(ALL_SCRIPTS, "redis.pcall('HSET', key, 'state',"),
    "half-a-result": _of_states(ALL_SCRIPTS, "event.text"),
    "log-for-ever": _of_states(ALL_SCRIPTS, "log_ttl()"),
    "key-astray": _of_states(ALL_SCRIPTS, "prefix .. 'tokens:'"),
    "script-raises": _of_states(ALL_SCRIPTS, "redis.call('HDEL', keys.request(id), 'fence'"),
}


def break_scripts() -> None:
    """Have this process send the scripts of the mutant that its environment names, if any."""
    if name := os.environ.get(VARIABLE):
        request_queue.script_text = MUTANTS[name].texts().__getitem__
