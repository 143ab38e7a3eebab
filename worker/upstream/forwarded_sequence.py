"""A sequence on its way through an inference server, and the choice of a stream to preempt."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

from promptq.worker.engine.api.messages import EngineRequest, PromptLogprobs, SequenceTiming
from promptq.worker.engine.core.tenant_shares import TenantShares


@dataclass(slots=True, eq=False)
class ForwardedSequence:
    """One attempt at a request, from `add` to its last output or its abort."""

    request: EngineRequest
    emitted: list[int]
    timing: SequenceTiming = field(default_factory=SequenceTiming)
    slot: int | None = None
    stream: asyncio.Task[None] | None = None
    prompt_logprobs: list[PromptLogprobs] | None = None
    """The prompt's log-probabilities, until an output reports them."""
    is_reported: bool = False
    """Whether an output has reported the time of this attempt's first token."""

    @property
    def sequence_id(self) -> int:
        return self.request.sequence_id

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.emitted)

    @property
    def num_prompt_tokens(self) -> int:
        reported = self.timing.prompt_tokens
        return self.request.num_prompt_tokens if reported is None else reported

    def __lt__(self, other: ForwardedSequence) -> bool:
        return self.request.order < other.request.order

    @property
    def urgency(self) -> tuple[int, tuple[float, str]]:
        """A sort key: the most urgent sequence comes first."""
        return self.request.priority, self.request.order


def preemption(
    waiting: Collection[ForwardedSequence],
    streams: Collection[ForwardedSequence],
    able: Collection[ForwardedSequence],
    num_slots: int,
) -> tuple[ForwardedSequence, ForwardedSequence] | None:
    """Returns a waiting sequence, and the stream of `able` whose slot the sequence may have; None
    if there is no such pair.

    If a waiting sequence has a more urgent priority, the least urgent stream loses its slot.
    Otherwise a tenant without a stream may get a slot of the tenant with the largest share, if this
    share is too large. The newest stream of that tenant loses its slot.
    """
    urgent = min(waiting, key=lambda each: each.urgency)
    victim = max(able, key=lambda each: each.urgency, default=None)
    if victim is not None and victim.request.priority > urgent.request.priority:
        return urgent, victim
    priority, tenants = urgent.request.priority, {stream.request.tenant for stream in streams}
    newcomers = (each for each in waiting if each.request.priority == priority)
    newcomer = min((each for each in newcomers if each.request.tenant not in tenants), default=None)
    if newcomer is None:
        return None
    shares = TenantShares(num_slots, 1, ((stream.request, 0) for stream in streams))
    victim = max(
        (
            stream
            for stream in able
            if stream.request.priority == priority
            and shares.may_make_room(stream.request, 0, newcomer.request, 0)
        ),
        key=lambda stream: (shares.of_tenant(stream.request), stream.request.order),
        default=None,
    )
    return None if victim is None else (newcomer, victim)
