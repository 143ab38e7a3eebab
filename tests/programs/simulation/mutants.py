"""Faults in the Python code of promptq, one in each mutant, which the worlds must find."""

from __future__ import annotations

from tests.programs.simulation.breaking import Mutant, ScriptMutant
from tests.programs.simulation.part_mutants import PART_MUTANTS

_STREAM = "promptq.producer.clients.resumable_stream"
_SUBSCRIPTIONS = "promptq.producer.clients.subscriptions"
_LEASES = "promptq.worker.leases.held_and_lost_leases"
_EXCHANGE = "promptq.worker.leases.exchange"
_PUBLISHER = "promptq.worker.leases.publisher"
_COALESCER = "promptq.worker.leases.coalescer"
_PREFETCHER = "promptq.worker.leases.prefetcher"
_READY = "promptq.worker.leases.ready"
_POLICY = "promptq.worker.leases.token_budget"
_PREPARATION = "promptq.worker.leases.prepare_or_resume"
_ROWS = "promptq.worker.leases.rows"
_HEARTBEAT = "promptq.worker.health.heartbeat"
_REAPER = "promptq.worker.health.reaper"
_WATCHDOGS = "promptq.worker.health.watchdogs"
_WORKER = "promptq.worker.serve.worker"
_CONTROL = "promptq.worker.serve.control_channel"
_RETRY = "promptq.shared.server.retry"
_CLAIMS = "promptq.shared.queue.claim_history"
_QUEUE = "promptq.shared.queue.request_queue"

_OF_STREAMS = {
    "stream-repeats": Mutant(
        _STREAM,
        "        if not event.is_last and event.end <= self._position:\n            return\n"
        "        if event.index < self._position and self._text_from is not None:\n"
        "            event = yield from self._beyond(event)\n",
        "",
    ),
    "stream-gaps": Mutant(
        _STREAM, "if event is not None and event.index <= self._position:", "if event is not None:"
    ),
    "stream-never-reads-after-subscribing": Mutant(
        _STREAM,
        "            else:\n                if answer is Notice.SUBSCRIBED and self._token_ids:",
        "            elif answer is not Notice.SUBSCRIBED:\n                if False:",
    ),
    "stream-never-reads-in-silence": Mutant(
        _STREAM,
        "            else:\n                if answer is Notice.SUBSCRIBED and self._token_ids:",
        "            elif answer is not None:\n                if False:",
    ),
    "stream-drops-an-empty-last-event": Mutant(
        _STREAM, "if not event.is_last and event.end <=", "if event.end <="
    ),
    "stream-gives-up-early": Mutant(_STREAM, "GIVE_UP_SECONDS = 60.0", "GIVE_UP_SECONDS = 1.0"),
    "stream-never-reconnects": Mutant(_STREAM, "if not is_away(error):", "if is_away(error):"),
    "stream-repeats-text-of-the-result": Mutant(
        _STREAM, '"text": result.text[text_start:],', '"text": result.text,'
    ),
    "keeper-forgets-to-subscribe-again": Mutant(
        _SUBSCRIPTIONS,
        "        self._requested.clear()\n        self._unanswered.clear()\n",
        "        self._unanswered.clear()\n",
    ),
    "keeper-ends-with-the-connection": Mutant(
        _SUBSCRIPTIONS,
        "await pubsub.connection.disconnect(nowait=True)\n                    seconds",
        "return\n                    seconds",
    ),
    "keeper-never-unsubscribes": Mutant(
        _SUBSCRIPTIONS,
        "            del self._mailboxes[channel]\n            self._changed.set()\n",
        "            del self._mailboxes[channel]\n",
    ),
    "keeper-fails-in-silence": Mutant(
        _SUBSCRIPTIONS,
        "            for mailbox in channel:\n                mailbox.put(error)\n",
        "            pass\n",
    ),
    "mailbox-drops-what-a-busy-stream-missed": Mutant(
        _SUBSCRIPTIONS, "        self._unread.append(own)\n", ""
    ),
    "mailbox-never-rings": Mutant(
        _SUBSCRIPTIONS,
        "elif not self._todo.done():\n            self._pass_on(None)",
        "else:\n            return",
    ),
}

_OF_CALLS = {
    "no-call-is-repeated": Mutant(_RETRY, "if tried_seconds >= seconds:", "if True:"),
    "a-lost-connection-is-final": Mutant(
        _RETRY, "return isinstance(error, (ConnectionError, TimeoutError)) or", "return"
    ),
    "claims-name-no-answer": Mutant(_CLAIMS, "self._answered = turn.nonce", "pass"),
    "claims-stay-under-way": Mutant(
        _CLAIMS,
        "        finally:\n            if is_alone:\n                self._is_under_way = False\n",
        "            if is_alone:\n                self._is_under_way = False\n"
        "        finally:\n            pass\n",
    ),
    "a-cancelled-claim-keeps-its-requests": Mutant(
        _QUEUE, "            await self.release([claim.as_held() for claim in claims])\n", ""
    ),
}

_OF_LEASES = {
    "a-lost-lease-goes-on": Mutant(_LEASES, "if status.is_lost or reason:", "if reason:"),
    "a-lost-lease-is-not-aborted": Mutant(
        _LEASES, "            if not is_removed:\n", "            if False:\n"
    ),
    "a-lease-is-never-forgotten": Mutant(
        _LEASES, "            del self._by_request[lease.request_id]\n", "            pass\n"
    ),
    "ended-sequences-count-as-running": Mutant(
        _LEASES, "            del self._running[lease.prepared.sequence_id]\n", ""
    ),
    "freed-room-is-not-reported": Mutant(_LEASES, "        self.wake_up.room_freed()\n", ""),
    "cancels-are-ignored": Mutant(_EXCHANGE, "            self._some_cancelled.set()\n", ""),
    "a-failed-cancel-ends-the-worker": Mutant(
        _EXCHANGE, 'self._log.warning("cancels not carried out", error=str(error))', "raise"
    ),
    "returns-are-repeated-at-once": Mutant(
        _EXCHANGE, "await asyncio.sleep(_RETRY_SECONDS)", "await asyncio.sleep(0)"
    ),
    "renewals-come-too-late": Mutant(
        _WATCHDOGS, "_RENEWALS_PER_LEASE = 4", "_RENEWALS_PER_LEASE = 1.2"
    ),
    "only-running-requests-are-renewed": Mutant(
        _WATCHDOGS,
        "elif held := list(leases):",
        "elif held := [lease for lease in leases if leases.by_sequence("
        "lease.prepared_or_none.sequence_id if lease.prepared_or_none else 0)]:",
    ),
    "a-failed-renewal-ends-the-worker": Mutant(
        _WATCHDOGS,
        "        except (RedisError, OSError) as error:\n            note_failure(error)\n",
        "        finally:\n            pass\n",
    ),
}

_OF_OUTPUT = {
    "rows-are-sent-once": Mutant(
        _PUBLISHER,
        "self._queue.publish([row for _, row in rows], lengths), self._retry_seconds",
        "self._queue.publish([row for _, row in rows], lengths), 0.0",
    ),
    "answers-to-rows-are-ignored": Mutant(
        _PUBLISHER,
        "if status is RowStatus.OK and not row.finish_reason:",
        "if not row.finish_reason:",
    ),
    "a-stopped-sequence-goes-on": Mutant(
        _PUBLISHER, "by_engine=output.finish_reason is not None", "by_engine=True"
    ),
    "the-publisher-does-not-feed": Mutant(
        _PUBLISHER,
        "        self._leases.feed()  # before the round trip,"
        " so that free slots do not wait for it\n"
        "        if rows:\n            await self._send(rows)\n            self._leases.feed()\n",
        "        if rows:\n            await self._send(rows)\n",
    ),
    "delayed-tokens-wait-for-a-step": Mutant(
        _PUBLISHER,
        "        yield from self._coalescer.take_due()  # also if there was no step\n",
        "",
    ),
    "coalescer-drops-waiting-tokens": Mutant(
        _COALESCER, "output.token_ids = before.token_ids + output.token_ids", "pass"
    ),
    "coalescer-drops-waiting-logprobs": Mutant(
        _COALESCER, "output.logprobs = before.logprobs + output.logprobs", "pass"
    ),
    "coalescer-delays-too-long": Mutant(
        _COALESCER,
        "min(len(outputs) / self._events_per_second, LONGEST_SECONDS)",
        "len(outputs) / self._events_per_second",
    ),
    "coalescer-delays-nothing": Mutant(
        _COALESCER, "if now < self._due_at or not self._waiting:", "if not self._waiting:"
    ),
    "rows-forget-texts": Mutant(_ROWS, "        self.texts.append(text)\n", ""),
    "a-resumed-request-begins-anew": Mutant(
        _PREPARATION,
        "emitted = [token_id for event in claim.events for token_id in event.token_ids]\n",
        "pass\n",
    ),
}

_OF_CLAIMS = {
    "idle-worker-spins": Mutant(
        _PREFETCHER,
        "if not await self._wake_up.wait(seconds):",
        "if not await self._wake_up.wait(seconds / 100):",
    ),
    "a-failed-claim-ends-the-worker": Mutant(
        _PREFETCHER,
        "            except (RedisError, OSError) as error:\n                note_failure(error)\n",
        "",
    ),
    "nothing-is-claimed-without-a-message": Mutant(
        _PREFETCHER, "            self._wake_up.work_came()  # perhaps a message was missed\n", ""
    ),
    "messages-during-a-claim-are-lost": Mutant(
        _PREFETCHER,
        "        self._wake_up.claimed(claims.num_pending)\n",
        "        self._wake_up.claimed(claims.num_pending)\n        self._wake_up.take()\n",
    ),
    "a-full-claim-counts-as-empty": Mutant(
        _PREFETCHER, "self._too_small = None if claims else room", "self._too_small = room"
    ),
    "a-lost-claim-is-left-behind": Mutant(
        _PREFETCHER, "if self._queue.has_unanswered_claim:", "if False:"
    ),
    "room-counts-only-if-nothing-waits": Mutant(
        _READY, "if self._num_left:", "if not self._num_left:"
    ),
    "held-requests-need-no-slots": Mutant(
        _POLICY, "max_count=places - leases.num_counted", "max_count=places"
    ),
    "messages-wake-nobody": Mutant(
        _CONTROL, "            wake_up.work_came()\n", "            pass\n"
    ),
    "a-lost-channel-ends-the-worker": Mutant(
        _CONTROL,
        "        except (RedisError, OSError) as error:\n            note_failure(error)\n"
        "            await asyncio.sleep(_RECONNECT_SECONDS)\n",
        "",
    ),
}

_OF_UPKEEP = {
    "reaper-never-reaps": Mutant(_REAPER, "while await self._reap():", "while False:"),
    "reaper-reaps-after-an-outage": Mutant(
        _REAPER, "if now - self.reached_at > self._patience:", "if False:"
    ),
    "reaper-has-no-patience": Mutant(_REAPER, " and self.reached_at >= self._patient_until:", ":"),
    "reaper-forgets-that-it-reached-the-server": Mutant(
        _REAPER,
        "        self.reached_at = now\n",
        "",
    ),
    "a-heartbeat-stays-behind": Mutant(
        _HEARTBEAT,
        "scripts.heartbeat(self.stats(), 0)",
        "scripts.heartbeat(self.stats(), RECORD_MS)",
    ),
    "a-heartbeat-repeats-its-batch": Mutant(
        _HEARTBEAT,
        "self._next_snapshot.result(), None",
        "self._next_snapshot.result(), self._next_snapshot",
    ),
    "heartbeats-are-rare": Mutant(_HEARTBEAT, "INTERVAL_SECONDS = 1.0", "INTERVAL_SECONDS = 9.0"),
    "work-is-counted-again": Mutant(
        "promptq.worker.leases.meter",
        "taken, self._contribution = self._contribution, Contribution()",
        "taken = self._contribution",
    ),
    "a-drain-goes-on-claiming": Mutant(
        _WORKER,
        "        await self._survive_redis(self.intake.stop)\n        while",
        "        while",
    ),
    "a-drain-interrupts": Mutant(
        _WORKER, "while self.leases.is_busy and not", "while False and not"
    ),
    "a-stop-gives-nothing-back": Mutant(
        _WORKER,
        "        await self._survive_redis(lambda: self._exchange.give_back(seconds))\n",
        "",
    ),
    "a-stop-leaves-its-tasks": Mutant(_WORKER, "        await end(self._tasks)\n", ""),
    "a-failed-upkeep-ends-the-worker": Mutant(
        _WORKER,
        "        except (RedisError, OSError) as error:\n            note_failure(error)\n"
        "        except SpoiltRecordError",
        "        except SpoiltRecordError",
    ),
}

MUTANTS = {
    **_OF_STREAMS,
    **_OF_CALLS,
    **_OF_LEASES,
    **_OF_OUTPUT,
    **_OF_CLAIMS,
    **_OF_UPKEEP,
}

_SCRIPTS = (
    *("attempts-not-counted", "cancel-drops-leases", "cancel-ignored", "claim-without-lease"),
    *("deadline-ignored", "early-reap", "finish-keeps-holds", "finish-without-state"),
    *("half-a-result", "key-astray", "log-for-ever", "log-trimmed", "lost-fence", "no-reap"),
    *("resume-refused", "rows-after-the-end", "rows-anywhere", "script-raises"),
)
SCRIPT_MUTANTS = {f"script: {name}": ScriptMutant(name) for name in _SCRIPTS}
ALL_MUTANTS: dict[str, Mutant | ScriptMutant] = {**MUTANTS, **PART_MUTANTS, **SCRIPT_MUTANTS}
GROUPS = {"all": ALL_MUTANTS, "python": MUTANTS, "parts": PART_MUTANTS, "scripts": SCRIPT_MUTANTS}
QUICK = (
    *("a-drain-interrupts", "a-failed-upkeep-ends-the-worker", "a-heartbeat-stays-behind"),
    *("a-lease-is-never-forgotten", "a-lost-lease-is-not-aborted", "a-resumed-request-begins-anew"),
    *("a-stop-leaves-its-tasks", "coalescer-delays-nothing", "coalescer-drops-waiting-logprobs"),
    *("coalescer-drops-waiting-tokens", "delayed-tokens-wait-for-a-step"),
    *("ended-sequences-count-as-running", "heartbeats-are-rare", "idle-worker-spins"),
    "keeper-never-unsubscribes",
    *("mailbox-drops-what-a-busy-stream-missed", "messages-wake-nobody"),
    *("reaper-forgets-that-it-reached-the-server", "reaper-never-reaps", "renewals-come-too-late"),
    *("rows-forget-texts", "stream-drops-an-empty-last-event", "stream-gaps"),
    *("stream-never-reads-after-subscribing", "stream-repeats", "work-is-counted-again"),
)
"""Mutants of Python code that one of the first small worlds finds."""
