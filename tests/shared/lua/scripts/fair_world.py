"""A queue with tenants and a worker of so much room, driven step by step by the real scripts."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from promptq.shared.protocol.claims import Claim, Held, Room
from promptq.shared.protocol.events import TokenEvent, Usage
from promptq.shared.protocol.request import FinishReason, NewRequest, Request
from promptq.shared.protocol.rows import Row, RowStatus
from promptq.shared.queue.request_queue import RequestQueue

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2


@dataclass
class Job:
    """A request: its tenant and true lengths, and how many tokens it has so far."""

    tenant: str
    prompt_tokens: int
    num_output: int
    num_emitted: int = 0
    was_claimed: bool = False
    told: bool = False
    claim: Claim | None = None


class World:
    """`room` is how many tokens of KV the worker has; no request is larger than `largest`.

    Every request is of `priority`. `service` is what each tenant got, by true lengths and weight.
    """

    def __init__(self, client: Any, rng: random.Random, *, room: int, largest: tuple[int, int]):
        self.client = client
        self.rng = rng
        self.queue = RequestQueue(client)
        self.room, self.largest_prompt, self.largest_output = room, *largest
        self.priority = 0
        self.weights: dict[str, float] = {}
        self.jobs: dict[str, Job] = {}
        self.running: list[Job] = []
        self.service: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()
        self._num = 0

    def set_weight(self, tenant: str, weight: float) -> None:
        self.weights[tenant] = weight
        self.client.hset(self.queue.keys.config, f"weight:{tenant}", weight)

    def put(
        self, tenant: str, prompt_tokens: int, num_output: int, *, plainly: bool = False
    ) -> str:
        """Enqueue by script, or with nothing but plain commands."""
        self._num += 1
        request_id = f"{self._num:06}"
        keys = self.queue.keys
        fields = {
            "prompt": "x" * prompt_tokens,
            "max_tokens": num_output,
            "priority": self.priority,
        }
        if plainly:
            key = keys.pending_of(tenant)
            with self.client.pipeline() as pipe:
                pipe.hset(keys.request(request_id), "payload", json.dumps(fields))
                pipe.zadd(key, {request_id: self._num})
                if tenant:
                    pipe.sadd(keys.tenants_waiting, tenant)
                pipe.execute()
        else:
            request = Request.build({**fields, "tenant": tenant or None})
            self.queue.enqueue([NewRequest(request_id, request)])
        self.jobs[request_id] = Job(tenant, prompt_tokens, num_output)
        self.waiting[tenant] += 1
        return request_id

    def claim(self) -> list[str]:
        """Take what there is room for for certain."""
        free = self.room - sum(job.prompt_tokens + job.num_output for job in self.running)
        count = free // (self.largest_prompt + self.largest_output)
        claims = self.queue.take_batch(Room(max_count=count, token_budget=2**40)) if count else []
        for claim in claims:
            job = self.jobs[claim.request_id]
            job.claim = claim
            self.running.append(job)
            self.waiting[job.tenant] -= 1
            if not job.was_claimed:
                self._serve(job, PROMPT_WEIGHT * job.prompt_tokens)
            job.was_claimed = True
        return [self.jobs[claim.request_id].tenant for claim in claims]

    def step(self) -> None:
        """One token for each that runs, in one call; those that have all of theirs end."""
        rows, held = [], []
        for job in self.running:
            assert job.claim is not None
            ended = job.num_emitted + 1 == job.num_output
            reason = FinishReason.LENGTH if ended else None
            usage = Usage(prompt_tokens=job.prompt_tokens) if ended else None
            event = TokenEvent(
                index=job.num_emitted, token_ids=[7], text="x", finish_reason=reason,
                attempt=job.claim.attempt, usage=usage,
            )  # fmt: skip
            rows.append(Row.of(job.claim.request_id, job.claim.fence, event))
            if not job.told:
                held.append(Held(job.claim.request_id, job.claim.fence, job.prompt_tokens))
                job.told = True
        published = self.queue.publish(rows, held)
        assert set(published.rows) <= {RowStatus.OK}
        for job in self.running:
            job.num_emitted += 1
            self._serve(job, OUTPUT_WEIGHT)
        self.running = [job for job in self.running if job.num_emitted < job.num_output]

    def hand_back(self) -> None:
        """Release one that runs, as a draining worker does."""
        if self.running:
            job = self.running.pop(self.rng.randrange(len(self.running)))
            assert job.claim is not None
            assert self.queue.release([Held(job.claim.request_id, job.claim.fence)]) == ["waiting"]
            self.waiting[job.tenant] += 1

    def finish_all(self) -> None:
        while self.running:
            self.step()

    def _serve(self, job: Job, service: float) -> None:
        self.service[job.tenant] += service / self.weights.get(job.tenant, 1)


class FairBound:
    """Holds what any two tenants get, while both have something waiting, to `most`.

    The difference of their service since any moment of such a time may not exceed it.
    """

    def __init__(self, world: World, most: float) -> None:
        self.world = world
        self.most = most
        self.worst = 0.0
        self._range: dict[tuple[str, str], tuple[float, float]] = {}

    def assert_holds(self) -> None:
        for pair in combinations(sorted(self.world.waiting), 2):
            one, other = pair
            if not (self.world.waiting[one] and self.world.waiting[other]):
                self._range.pop(pair, None)
                continue
            difference = self.world.service[one] - self.world.service[other]
            low, high = self._range.get(pair, (difference, difference))
            low, high = min(low, difference), max(high, difference)
            self._range[pair] = (low, high)
            self.worst = max(self.worst, high - low)
            assert high - low <= self.most, f"{one!r} against {other!r}: {high - low}"
