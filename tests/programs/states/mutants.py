"""Scripts with one fault each, which the exploration of states or a run of chaos must find."""

from __future__ import annotations

import os
from dataclasses import dataclass

from promptq.shared.queue import request_queue
from promptq.shared.queue.call import SCRIPT_NAMES, script_text
from tests.programs.states.world import Spec, World
from tests.programs.states.worlds import SMALL


@dataclass(frozen=True)
class Mutant:
    """A mutant: each script whose name begins with `script` has `new` in place of `old`."""

    breaks: str
    script: str
    old: str
    new: str
    world: World = SMALL["one request, everything but that it is forgotten"]
    in_chaos: str = ""
    """Its name in `python -m tests chaos --mutant`, which must find it too."""

    def texts(self) -> dict[str, str]:
        """Returns all scripts by name, some of them broken. Raises ValueError without `old`."""
        texts = {name: script_text(name) for name in SCRIPT_NAMES}
        broken = {
            name: text.replace(self.old, self.new)
            for name, text in texts.items()
            if name.startswith(self.script) and text.count(self.old) == 1
        }
        if not broken:
            raise ValueError(f"{self.old!r} does not stand once in any script {self.script}")
        return texts | broken


ALL_SCRIPTS = ""

TWO, PLAIN, DEAD, ONCE, LOST, LATE, ALL, MOVED, LIMITED, AGAIN, STRAY, SPOILT = (
    SMALL[name]
    for name in (
        "two requests, each losing its worker once",
        "one request of one token by plain commands, everything",
        "a dead letter and what is made of it",
        "two requests of one idempotency key, forgotten",
        "claims whose reply is lost",
        "claims that come late",
        "two requests, each of one token, in one call",
        "two requests, one of a tenant, that get other priorities",
        "two requests of a tenant that may run one",
        "one request by plain commands with a deadline, put in again",
        "one request that plain commands leave behind",
        "one request into whose log a stranger writes",
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
        in_chaos="key-astray",
    ),
    Mutant(
        "each_request_is_in_one_place",
        ALL_SCRIPTS,
        "redis.call('HSET', keys.request(id), 'state', 'waiting')",
        "",
    ),
    Mutant(
        "each_request_is_in_one_place",
        "claim",
        "server.for_all(redis.call, 'ZADD', keys.leases, new_leases)",
        "",
        in_chaos="claim-without-lease",
    ),
    Mutant(
        "nothing_is_held_after_the_end",
        ALL_SCRIPTS,
        "keys.leases, keys.deadlines, keys.delayed}",
        "keys.leases}",
        in_chaos="finish-keeps-holds",
    ),
    Mutant(
        "a_log_is_the_answer_so_far",
        "publish",
        "if not status and index ~= request.count then",
        "if not status and index < request.count then",
    ),
    Mutant(  # the hash does not get the final state
        "there_is_one_last_event",
        ALL_SCRIPTS,
        "redis.pcall('HSET', key, 'state',",
        "redis.pcall('HSET', key, 'was',",
        in_chaos="finish-without-state",
    ),
    Mutant(
        "a_result_is_the_whole_stream",
        ALL_SCRIPTS,
        "      texts[#texts + 1] = event.text\n",
        "      texts[1] = event.text\n",
        in_chaos="half-a-result",
    ),
    Mutant(  # a token in the log that is no number reaches the result
        "scripts_raise_no_errors",
        ALL_SCRIPTS,
        "if parsed and is_event(event) then",
        "if parsed then",
        SPOILT,
    ),
    Mutant(  # a number in the log that JSON cannot express raises an error
        "scripts_raise_no_errors",
        ALL_SCRIPTS,
        "local worked, text = pcall(cjson.encode, value)",
        "local worked, text = true, cjson.encode(value)",
        SPOILT,
    ),
    Mutant(
        "what_has_ended_goes_and_what_lives_stays",
        ALL_SCRIPTS,
        "redis.pcall('PEXPIRE', keys.tokens(id), log_ttl())",
        "",
        in_chaos="log-for-ever",
    ),
    Mutant(
        "what_has_ended_goes_and_what_lives_stays",
        "claim",
        "table.concat(words, ' '), 'PX', lease_ms)",
        "table.concat(words, ' '))",
        LOST,
    ),
    Mutant(  # a returned request gets a new score, at the end of the queue
        "a_place_in_the_queue_is_kept",
        ALL_SCRIPTS,
        "local number = tonumber(stored or nil)",
        "local number = nil",
    ),
    Mutant(  # the new priority is lost when a worker gives the request back
        "a_place_in_the_queue_is_kept",
        "reprioritise",
        ", 'score', text)",
        ")",
        MOVED,
    ),
    Mutant(
        "the_backlog_is_what_waits",
        ALL_SCRIPTS,
        "pending.count_later('tokens', fields.tenant, -numbers.whole(fields.tokens, 0))",
        "",
    ),
    Mutant(  # a returned request still counts as running
        "what_workers_hold_is_counted",
        ALL_SCRIPTS,
        "server.remove_later(keys.running_of(fields.tenant), id)",
        "",
    ),
    Mutant(  # one claim may exceed the limit
        "what_workers_hold_is_counted",
        "claim",
        "numbers_held[key] + #(claimed[key] or {}) / 2 >= limit",
        "numbers_held[key] >= limit",
        LIMITED,
    ),
    Mutant(  # a returned request is not counted again
        "the_backlog_is_what_waits",
        ALL_SCRIPTS,
        "pending.count_later('tokens', fields.tenant, numbers.whole(fields.tokens, 0))",
        "",
    ),
    Mutant(  # the command meets a key of another type
        "scripts_raise_no_errors",
        ALL_SCRIPTS,
        "redis.call('HDEL', keys.request(id), 'fence'",
        "redis.call('HDEL', keys.leases, 'fence'",
        in_chaos="script-raises",
    ),
    Mutant(  # the script never ends
        "scripts_raise_no_errors",
        "reap",
        "server.write_needs_no_memory()\nlocal returned",
        "while true do server.write_needs_no_memory() end\nlocal returned",
    ),
    Mutant(
        "what_has_ended_never_changes",
        "publish",
        "if request.finished then return 'finished' end",
        "",
        in_chaos="rows-after-the-end",
    ),
    Mutant(  # a new deadline ends a request again whose log has expired
        "what_has_ended_never_changes",
        ALL_SCRIPTS,
        "if ended or requests.is_final(fields.state) then",
        "if ended then",
        AGAIN,
    ),
    Mutant(
        "a_log_only_grows",
        "publish",
        "keys.tokens(id), count .. '-0'",
        "keys.tokens(id), 'MAXLEN', 1, count .. '-0'",
        TWO,
        in_chaos="log-trimmed",
    ),
    Mutant(
        "subscribers_hear_what_the_log_gets",
        "publish",
        "      requests.publish_event(id, event)\n",
        "",
    ),
    Mutant(
        "only_the_newest_attempt_writes",
        "publish",
        "if request.fence ~= fence then return 'fenced' end",
        "",
        in_chaos="lost-fence",
    ),
    Mutant(  # compares only the attempt numbers, which an earlier request of this id may share
        "only_the_newest_attempt_writes",
        "publish",
        "if request.fence ~= fence then return 'fenced' end",
        "if (request.fence or '0'):match('%d+') ~= fence:match('%d+') then return 'fenced' end",
        DEAD,
    ),
    Mutant(
        "only_the_newest_attempt_writes",
        "release",
        "if fields.fence ~= fence then return 'fenced' end",
        "",
    ),
    Mutant(
        "only_the_newest_attempt_writes",
        "publish",
        "not request.was_finished and request.fence == fence",
        "not request.was_finished",
    ),
    Mutant(  # a zombie does not learn that it lost the request
        "who_lost_a_request_learns_it",
        "publish",
        "return {row_status, held_status}",
        "for n, status in ipairs(held_status) do"
        "  if status == 'fenced' then held_status[n] = 'ok' end "
        "end "
        "return {row_status, held_status}",
    ),
    Mutant(  # a row after a missing token counts as a duplicate
        "an_answer_to_a_row_is_true",
        "publish",
        "index < request.count and 'duplicate' or 'gap'",
        "'duplicate'",
    ),
    Mutant(
        "nothing_follows_a_cancel_but_the_end",
        "publish",
        "if not (request.cancelled or",
        "if not (",
        in_chaos="cancel-ignored",
    ),
    Mutant(
        "nothing_follows_a_cancel_but_the_end",
        "publish",
        "or request.expired) then",
        ") then",
        in_chaos="deadline-ignored",
    ),
    Mutant(
        "a_claim_takes_what_waits",
        "claim",
        "or requests.is_past_deadline(id) then",
        "then",
    ),
    Mutant(
        "a_claim_takes_what_waits",
        "claim",
        "local attempt = numbers.whole(fields.attempt, 0) + 1",
        "local attempt = math.max(1, numbers.whole(fields.attempt, 0))",
        in_chaos="attempts-not-counted",
    ),
    Mutant(  # also takes back requests whose reply arrived
        "a_lost_claim_comes_back",
        "claim",
        "if is_late or last_nonce == answered then return end",
        "if is_late then return end",
        LOST,
    ),
    Mutant(  # also takes back requests that another attempt holds by now
        "a_lost_claim_comes_back",
        "claim",
        "and string.match(fields.fence, '^%d+%-(.*)$') == last_nonce then",
        "then",
        LOST,
    ),
    Mutant(
        "a_lost_claim_comes_back",
        "claim",
        "pending.put_back(id, fields.score, 'its claim was lost')",
        "redis.call('HINCRBY', keys.request(id), 'crashes', 1)"
        " pending.put_back(id, fields.score, 'crashed')",
        LOST,
    ),
    Mutant(  # the server does not remember the claim
        "a_lost_claim_comes_back",
        "claim",
        "if session ~= '' and #claims > 0 then",
        "if false then",
        LOST,
    ),
    Mutant(  # a late claim takes back the requests of claims after it
        "a_lost_claim_comes_back",
        "claim",
        "is_late = number > 0 and number < last_number",
        "is_late = false",
        LATE,
    ),
    Mutant(
        "a_purge_deletes_dead_letters",
        "purge",
        "redis.call('DEL', keys.request(id), keys.tokens(id))",
        "redis.call('DEL', keys.request(id))",
        DEAD,
    ),
    Mutant(
        "a_purge_deletes_dead_letters",
        "purge",
        "redis.call('ZREM', keys.dead, id) == 0",
        "redis.call('EXISTS', keys.request(id)) == 0",
        DEAD,
    ),
    Mutant(  # the key's earlier request no longer exists
        "an_answer_to_a_producer_is_true",
        "enqueue",
        "return id and redis.pcall('HEXISTS', keys.request(id), 'payload') == 1 and id",
        "return id",
        ONCE,
    ),
    Mutant(  # a request that waited without a hash has ended
        "an_answer_to_a_producer_is_true",
        "enqueue",
        "and not requests.is_final(stored.state) then",
        "then",
        PLAIN,
    ),
    Mutant(
        "an_answer_to_a_producer_is_true",
        "enqueue",
        "payload, 'state', 'waiting', 'score', score",
        "payload, 'state', 'active', 'score', score",
    ),
    Mutant(  # the call is refused because of one id, but the requests before it wait
        "an_answer_to_a_producer_is_true",
        "enqueue",
        "elseif not nonce or (stored or {}).nonce ~= nonce then",
        "elseif not nonce or (stored or {}).nonce ~= nonce then"
        " for _, it in ipairs(fresh) do pending.put(it.id, server.now_text, it.tenant) end",
        ALL,
    ),
    Mutant(  # a cancel does not end a waiting request
        "an_answer_to_a_producer_is_true",
        "cancel",
        "ending.finish_bare(id, 'cancelled')",
        "",
    ),
    Mutant(  # only the first of several requests is given back
        "an_answer_to_who_gives_back_is_true",
        "release",
        "statuses[nth] = give_back(",
        "statuses[nth] = nth > 1 and 'waiting' or give_back(",
        ALL,
    ),
    Mutant(
        "an_answer_to_who_gives_back_is_true",
        "release",
        "return crashes.count(id, fields.score, max_crashes)",
        "crashes.count(id, fields.score, max_crashes) return 'waiting'",
    ),
    Mutant(  # overwrites a payload that another client has changed meanwhile
        "a_change_of_priority_is_whole",
        "reprioritise",
        "if fields.payload ~= ARGV[3] then return 'stale' end",
        "",
        MOVED,
    ),
    Mutant(
        "a_change_of_priority_is_whole",
        "reprioritise",
        "if redis.call('ZSCORE', keys.leases, id) then return 'active' end",
        "",
        MOVED,
    ),
    Mutant(  # a delayed request waits in `pending` at once
        "a_change_of_priority_is_whole",
        "reprioritise",
        "if queue then redis.call('ZADD', queue, text, id) end",
        "redis.call('ZADD', queue or keys.pending, text, id)",
        MOVED,
    ),
    Mutant(
        "others_are_left_alone",
        "cancel",
        "if mode ~= 'any' then return 'active' end",
        "if mode ~= 'any' then return 'active' end redis.call('DEL', keys.leases)",
        TWO,
        in_chaos="cancel-drops-leases",
    ),
    Mutant(
        "a_reaper_leaves_nothing_overdue",
        "reap",
        "server.due(keys.leases, server.now_text,",
        "server.due(keys.leases, '0',",
        in_chaos="no-reap",
    ),
    Mutant(
        "a_reaper_leaves_nothing_overdue",
        "reap",
        "pending.promote_delayed(), 0, 0, 0",
        "0, 0, 0, 0",
    ),
    Mutant(
        "a_reaper_leaves_nothing_overdue",
        "reap",
        "dead = dead + 1",
        "returned = returned + 1",
    ),
    Mutant(  # deletes dead letters before their time
        "a_reaper_leaves_nothing_overdue",
        "reap",
        "numbers.exact(server.now - dead_ttl)",
        "now_text",
        DEAD,
    ),
    Mutant(
        "a_reaper_leaves_nothing_overdue",
        "reap",
        "if dead_ttl > 0",
        "if dead_ttl > 2000000000",
        DEAD,
    ),
    Mutant(  # deletes at once, perhaps before a plain client's second command
        "a_sweep_lets_go_of_orphans",
        "sweep",
        "server.due(orphans, numbers.exact(server.now - grace_ms),",
        "server.due(orphans, server.now_text,",
        STRAY,
    ),
    Mutant(  # deletes a key that was an orphan an hour ago and is none now
        "a_sweep_lets_go_of_orphans",
        "sweep",
        "  if is_orphan(id) then\n    let_go(id)",
        "  if true then\n    let_go(id)",
        STRAY,
    ),
    Mutant(  # deletes a request without its last event, for which a client may wait
        "a_sweep_lets_go_of_orphans",
        "sweep",
        "if not fields or not (fields.state or fields.payload) then",
        "if true then",
        STRAY,
    ),
    Mutant(  # each sweep notes the orphan as new
        "progress",
        "sweep",
        "'NX', server.now_text",
        "now_text",
        STRAY,
    ),
    Mutant(  # a request that was begun is never claimed again
        "progress",
        "claim",
        "if is_newer(fields.payload)",
        "if fields.attempt",
        DEAD,
        in_chaos="resume-refused",
    ),
    Mutant(  # an id without a hash stays in the queue
        "progress",
        "claim",
        "if not fields.payload then\n",
        "if not fields.payload then return true end\n  if false then\n",
        LEFT_OVER,
    ),
)

_IN_CHAOS_ALONE = (
    Mutant(  # accepts a row whose position is before the end of the log
        "an_answer_to_a_row_is_true",
        "publish",
        "if not status and index ~= request.count then",
        "if not status and index > request.count then",
        in_chaos="rows-anywhere",
    ),
    Mutant(  # returns requests whose lease has not expired
        "only_the_newest_attempt_writes",
        "reap",
        "server.due(keys.leases, server.now_text,",
        "server.due(keys.leases, '+inf',",
        in_chaos="early-reap",
    ),
)
CHAOS_MUTANTS = {
    mutant.in_chaos: mutant for mutant in (*MUTANTS, *_IN_CHAOS_ALONE) if mutant.in_chaos
}
CHAOS_VARIABLE = "PROMPTQ_CHAOS_MUTANT"
"""The environment variable that names the mutant whose scripts a run's workers and clients send."""


def break_scripts() -> None:
    """Make this process send the scripts of the mutant that the environment names. Does nothing if
    the environment names none."""
    if name := os.environ.get(CHAOS_VARIABLE):
        request_queue.script_text = CHAOS_MUTANTS[name].texts().__getitem__
