"""Scripts broken in one place each, so that one invariant does not hold any more."""

from __future__ import annotations

from dataclasses import dataclass

from shared import scripts
from tests.shared.states.world import World
from tests.shared.states.worlds import SMALL

ONE, _, TWO = SMALL.values()


@dataclass(frozen=True)
class Mutant:
    """`old` stands once in the file, where `new` is put in its place."""

    breaks: str
    file: str
    old: str
    new: str
    world: World = ONE

    def texts(self) -> dict[str, str]:
        """All scripts by name, this one broken."""
        common = scripts.read_lua("_common")
        texts = {name: scripts.read_lua(name) for name in scripts.SCRIPT_NAMES}
        if self.file == "_common":
            common = self._break(common)
        else:
            texts[self.file] = self._break(texts[self.file])
        return {name: common + text for name, text in texts.items()}

    def _break(self, text: str) -> str:
        if text.count(self.old) != 1:
            raise ValueError(f"{self.old!r} stands {text.count(self.old)} times in {self.file}.lua")
        return text.replace(self.old, self.new)


MUTANTS = (
    Mutant(
        "keys_bear_the_queues_name",
        "_common",
        "return prefix .. 'tokens:' .. id",
        "return 'tokens:' .. id",
    ),
    Mutant(  # who comes back is not put into the queue
        "each_request_is_in_one_place",
        "_common",
        "redis.call('ZADD', pending, place(score), id)",
        "",
    ),
    Mutant(
        "each_request_is_in_one_place",
        "claim",
        "call_for_all('ZADD', leases, new_leases)",
        "",
    ),
    Mutant(  # the end leaves the sets as they are
        "nothing_is_held_after_the_end",
        "_common",
        "  drop_holds(id)\n  if reason ==",
        "  if reason ==",
    ),
    Mutant(
        "a_log_is_the_answer_so_far",
        "publish",
        "elseif index > request.count then status = 'gap'",
        "elseif false then",
    ),
    Mutant(  # the hash is not told of the end
        "there_is_one_last_event",
        "_common",
        "else\n    redis.pcall('HSET', key, 'state',",
        "else\n    redis.pcall('HSET', key, 'was',",
    ),
    Mutant(
        "a_result_is_the_whole_stream",
        "_common",
        "    texts[#texts + 1] = last.text\n",
        "    texts[1] = last.text\n",
    ),
    Mutant(
        "what_has_ended_goes_and_what_lives_stays",
        "_common",
        "redis.pcall('PEXPIRE', tokens_key(id), whole(config('log_ttl_ms'), 60000))",
        "",
    ),
    Mutant(  # to the end of the queue
        "a_place_in_the_queue_is_kept",
        "_common",
        "redis.call('ZADD', pending, place(score), id)",
        "redis.call('ZADD', pending, place(nil), id)",
    ),
    Mutant(  # of another type
        "scripts_raise_no_errors",
        "_common",
        "redis.call('HDEL', request_key(id), 'fence', 'worker')",
        "redis.call('HDEL', leases, 'fence', 'worker')",
    ),
    Mutant(
        "what_has_ended_never_changes",
        "publish",
        "if request.finished then return 'finished' end",
        "",
    ),
    Mutant(
        "a_log_only_grows",
        "publish",
        "redis.pcall('XADD', tokens_key(id), count",
        "redis.pcall('XADD', tokens_key(id), 'MAXLEN', 1, count",
    ),
    Mutant(
        "subscribers_hear_what_the_log_gets", "publish", "      publish_event(id, event)\n", ""
    ),
    Mutant(
        "only_the_newest_attempt_writes",
        "publish",
        "if request.fence ~= fence then return 'fenced' end",
        "",
    ),
    Mutant(
        "only_the_newest_attempt_writes",
        "release",
        "elseif fields.fence ~= fence then",
        "elseif false then",
    ),
    Mutant(  # a zombie goes on, though nothing of it is written
        "who_lost_a_request_learns_it",
        "publish",
        "return {row_status, held_status}",
        "for n, status in ipairs(held_status) do if status == 'fenced' then held_status[n] = 'ok' end"
        " end return {row_status, held_status}",
    ),
    Mutant(  # a token that never came counts as there
        "an_answer_to_a_row_is_true",
        "publish",
        "if index < request.count then",
        "if index ~= request.count then",
    ),
    Mutant(
        "nothing_follows_a_cancel_but_the_end",
        "publish",
        "if request.cancelled then return 'cancelled' end",
        "",
    ),
    Mutant(
        "nothing_follows_a_cancel_but_the_end",
        "publish",
        "if expired[id] then return 'expired' end",
        "",
    ),
    Mutant(
        "a_claim_takes_what_waits",
        "claim",
        "if expired[id] then return finish_bare(id, 'expired') end",
        "",
    ),
    Mutant(
        "a_claim_takes_what_waits",
        "claim",
        "local attempt = whole(fields.attempt, 0) + 1",
        "local attempt = math.max(1, whole(fields.attempt, 0))",
    ),
    Mutant(  # the second enqueue is taken, too
        "an_answer_to_a_producer_is_true", "enqueue", "if payload ~= 0 or", "if"
    ),
    Mutant(  # a cancel that does not end what waits
        "an_answer_to_a_producer_is_true",
        "cancel",
        "finish_bare(id, 'cancelled')",
        "",
    ),
    Mutant(
        "others_are_left_alone",
        "cancel",
        "redis.call('ZREM', pending, id)",
        "redis.call('DEL', pending)",
        TWO,
    ),
    Mutant(
        "a_reaper_leaves_nothing_overdue",
        "reap",
        "redis.call('ZRANGE', leases, '-inf', now_text, 'BYSCORE'",
        "redis.call('ZRANGE', leases, '-inf', '0', 'BYSCORE'",
    ),
    Mutant(
        "a_reaper_leaves_nothing_overdue",
        "reap",
        "promote_delayed(), 0, 0",
        "0, 0, 0",
    ),
    Mutant(  # what was begun is never begun again
        "progress",
        "claim",
        "if is_newer(fields.payload) then return end",
        "if fields.attempt then return end",
    ),
)
