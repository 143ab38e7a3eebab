"""Scripts broken in one place each, so that one invariant does not hold any more."""

from __future__ import annotations

from tests.shared.states.mutant import ALL_SCRIPTS, Mutant
from tests.shared.states.world import Spec, World
from tests.shared.states.worlds import SMALL

TWO, PLAIN, DEAD, ONCE, LOST, LATE, MOVED, STRAY = (
    SMALL[name]
    for name in (
        "two requests, each losing its worker once",
        "one request of one token by plain commands, everything",
        "a dead letter and what is made of it",
        "two requests of one idempotency key, forgotten",
        "claims whose reply is lost",
        "claims that come late",
        "two requests, one of a tenant, that get other priorities",
        "one request that plain commands leave behind",
    )
)
LEFT_OVER = World(
    (Spec("r1", 100, num_tokens=1, plain=True),),
    frozenset({"produce", "again", "cancel", "claim", "publish", "tidy", "forget"}),
    losses=0,
    num_workers=1,
)

MUTANTS = (
    Mutant(
        "keys_bear_the_queues_name",
        ALL_SCRIPTS,
        "return prefix .. 'tokens:' .. id",
        "return 'tokens:' .. id",
    ),
    Mutant(
        "each_request_is_in_one_place",
        ALL_SCRIPTS,
        "redis.call('HSET', request_key(id), 'state', 'waiting')",
        "",
    ),
    Mutant(
        "each_request_is_in_one_place",
        "claim",
        "call_for_all('ZADD', leases, new_leases)",
        "",
    ),
    Mutant(
        "nothing_is_held_after_the_end",
        ALL_SCRIPTS,
        "leases, deadlines, delayed}",
        "leases}",
    ),
    Mutant(
        "a_log_is_the_answer_so_far",
        "publish",
        "elseif index > request.count then status = 'gap'",
        "elseif false then",
    ),
    Mutant(  # the hash is not told of the end
        "there_is_one_last_event",
        ALL_SCRIPTS,
        "else\n    redis.pcall('HSET', key, 'state',",
        "else\n    redis.pcall('HSET', key, 'was',",
    ),
    Mutant(
        "a_result_is_the_whole_stream",
        ALL_SCRIPTS,
        "    texts[#texts + 1] = last.text\n",
        "    texts[1] = last.text\n",
    ),
    Mutant(
        "what_has_ended_goes_and_what_lives_stays",
        ALL_SCRIPTS,
        "redis.pcall('PEXPIRE', tokens_key(id), log_ttl())",
        "",
    ),
    Mutant(
        "what_has_ended_goes_and_what_lives_stays",
        "claim",
        "table.concat(words, ' '), 'PX', lease_ms)",
        "table.concat(words, ' '))",
        LOST,
    ),
    Mutant(  # to the end of the queue
        "a_place_in_the_queue_is_kept",
        ALL_SCRIPTS,
        "local number = tonumber(score or nil)",
        "local number = nil",
    ),
    Mutant(  # it is forgotten as soon as somebody has held it
        "a_place_in_the_queue_is_kept",
        "reprioritise",
        ", 'score', text)",
        ")",
        MOVED,
    ),
    Mutant(
        "the_backlog_is_what_waits",
        ALL_SCRIPTS,
        "count_later('tokens', tenant, -whole(fields.tokens, 0))",
        "",
    ),
    Mutant(  # what was begun is not counted any more
        "the_backlog_is_what_waits",
        ALL_SCRIPTS,
        "count_later('tokens', tenant_name(fields.tenant), whole(fields.tokens, 0))",
        "",
    ),
    Mutant(  # of another type
        "scripts_raise_no_errors",
        ALL_SCRIPTS,
        "redis.call('HDEL', request_key(id), 'fence'",
        "redis.call('HDEL', leases, 'fence'",
    ),
    Mutant(  # without an end
        "scripts_raise_no_errors",
        "reap",
        "write_needs_no_memory()\nlocal returned",
        "while true do write_needs_no_memory() end\nlocal returned",
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
        "tokens_key(id), count .. '-0'",
        "tokens_key(id), 'MAXLEN', 1, count .. '-0'",
        TWO,
    ),
    Mutant("subscribers_hear_what_the_log_gets", "publish", "      publish_event(id, event)\n", ""),
    Mutant(
        "only_the_newest_attempt_writes",
        "publish",
        "if request.fence ~= fence then return 'fenced' end",
        "",
    ),
    Mutant(  # an attempt at an earlier request of this id has the same number
        "only_the_newest_attempt_writes",
        "publish",
        "if request.fence ~= fence then return 'fenced' end",
        "if (request.fence or '0'):match('%d+') ~= fence:match('%d+') then return 'fenced' end",
        DEAD,
    ),
    Mutant(
        "only_the_newest_attempt_writes",
        "release",
        "elseif fields.fence ~= fence then",
        "elseif false then",
    ),
    Mutant(
        "only_the_newest_attempt_writes",
        "publish",
        "not request.was_finished and request.fence == fence",
        "not request.was_finished",
    ),
    Mutant(  # a zombie goes on, though nothing of it is written
        "who_lost_a_request_learns_it",
        "publish",
        "return {row_status, held_status}",
        "for n, status in ipairs(held_status) do"
        "  if status == 'fenced' then held_status[n] = 'ok' end "
        "end "
        "return {row_status, held_status}",
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
        "if expired[id] then",
        "if false then",
    ),
    Mutant(
        "a_claim_takes_what_waits",
        "claim",
        "local attempt = whole(fields.attempt, 0) + 1",
        "local attempt = math.max(1, whole(fields.attempt, 0))",
    ),
    Mutant(  # what it heard of, too
        "a_lost_claim_comes_back",
        "claim",
        "if is_late or last_nonce == answered then return end",
        "if is_late then return end",
        LOST,
    ),
    Mutant(  # what another attempt has by now, too
        "a_lost_claim_comes_back",
        "claim",
        "and string.match(fields.fence, '^%d+%-(.*)$') == last_nonce then",
        "then",
        LOST,
    ),
    Mutant(
        "a_lost_claim_comes_back",
        "claim",
        "back_to_waiting(id, fields.score, 'its claim was lost')",
        "count_crash(id, fields.score, 3)",
        LOST,
    ),
    Mutant(  # nothing is known of it
        "a_lost_claim_comes_back",
        "claim",
        "if session ~= '' and #claims > 0 then",
        "if false then",
        LOST,
    ),
    Mutant(  # it takes back what the claims behind it gave
        "a_lost_claim_comes_back",
        "claim",
        "is_late = number > 0 and number < last_number",
        "is_late = false",
        LATE,
    ),
    Mutant(
        "a_purge_deletes_dead_letters",
        "purge",
        "redis.call('DEL', request_key(id), tokens_key(id))",
        "redis.call('DEL', request_key(id))",
        DEAD,
    ),
    Mutant(
        "a_purge_deletes_dead_letters",
        "purge",
        "redis.call('ZREM', prefix .. 'dead', id) == 1",
        "redis.call('EXISTS', request_key(id)) == 1",
        DEAD,
    ),
    Mutant(  # a request that a key was used for is gone
        "an_answer_to_a_producer_is_true",
        "enqueue",
        "return id and redis.pcall('HEXISTS', request_key(id), 'payload') == 1 and id",
        "return id",
        ONCE,
    ),
    Mutant(  # what waited without a hash was ended
        "an_answer_to_a_producer_is_true",
        "enqueue",
        "and not is_final(fields.state) then",
        "then",
        PLAIN,
    ),
    Mutant(
        "an_answer_to_a_producer_is_true",
        "enqueue",
        "payload, 'state', 'waiting', 'score', score",
        "payload, 'state', 'active', 'score', score",
    ),
    Mutant(  # a cancel that does not end what waits
        "an_answer_to_a_producer_is_true",
        "cancel",
        "finish_bare(id, 'cancelled')",
        "",
    ),
    Mutant(  # what another one has changed meanwhile is overwritten
        "a_change_of_priority_is_whole",
        "reprioritise",
        "if fields.payload ~= ARGV[3] then return 'stale' end",
        "",
        MOVED,
    ),
    Mutant(
        "a_change_of_priority_is_whole",
        "reprioritise",
        "if redis.call('ZSCORE', leases, id) then return 'active' end",
        "",
        MOVED,
    ),
    Mutant(  # it jumps its delay
        "a_change_of_priority_is_whole",
        "reprioritise",
        "if queue then redis.call('ZADD', queue, text, id) end",
        "redis.call('ZADD', queue or pending, text, id)",
        MOVED,
    ),
    Mutant(
        "others_are_left_alone",
        "cancel",
        "if mode == 'any' then",
        "if mode == 'any' then redis.call('DEL', leases)",
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
    Mutant(  # before the second of a plain client's commands
        "a_sweep_lets_go_of_orphans",
        "sweep",
        "exact(now - grace_ms), 'BYSCORE'",
        "now_text, 'BYSCORE'",
        STRAY,
    ),
    Mutant(  # what was an orphan an hour ago, and is none
        "a_sweep_lets_go_of_orphans",
        "sweep",
        "  if is_orphan(id) then\n    let_go(id)",
        "  if true then\n    let_go(id)",
        STRAY,
    ),
    Mutant(  # somebody waits for its last event
        "a_sweep_lets_go_of_orphans",
        "sweep",
        "if not fields or not (fields.state or fields.payload) then",
        "if true then",
        STRAY,
    ),
    Mutant(  # noticed anew by each sweep
        "progress",
        "sweep",
        "'NX', now_text",
        "now_text",
        STRAY,
    ),
    Mutant(  # what was begun is never begun again
        "progress",
        "claim",
        "if is_newer(fields.payload) then",
        "if fields.attempt then",
        DEAD,
    ),
    Mutant(  # what waits and is gone waits on
        "progress",
        "claim",
        "if not fields.payload then\n",
        "if not fields.payload then return true end\n  if false then\n",
        LEFT_OVER,
    ),
)
