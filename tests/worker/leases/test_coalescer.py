"""Tokens of several steps go together where there are more of them than events should be."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable

import pytest

from promptq.shared.protocol.events import TokenLogprob
from promptq.shared.protocol.request import FinishReason
from promptq.worker.engine.api.messages import GivenBack, SequenceOutput, SequenceTiming
from promptq.worker.leases.coalescer import LONGEST_SECONDS, Coalescer
from tests.support.waiting import Clock

RATE = 1000.0


def told(outputs: Iterable[SequenceOutput]) -> list[tuple[int, list[int]]]:
    return [(output.sequence_id, output.token_ids) for output in outputs]


def step(coalescer: Coalescer, outputs: Iterable[SequenceOutput]) -> list[SequenceOutput]:
    """Returns the outputs that a step sends."""
    at_once = [each for output in outputs for each in coalescer.take(output)]
    return at_once + coalescer.take_due()


def test_few_streams_get_each_token_by_itself() -> None:
    clock = Clock()
    coalescer = Coalescer(RATE, clock)
    for token in range(20):
        assert told(step(coalescer, [SequenceOutput(n, [token]) for n in range(4)])) == [
            (n, [token]) for n in range(4)
        ]
        assert coalescer.seconds_left is None
        clock.now += 0.005


def test_many_streams_get_some_tokens_at_a_time() -> None:
    """64 streams at 1,000 events a second: each stream has one every 64 ms."""
    clock = Clock()
    coalescer = Coalescer(RATE, clock)
    sent = []
    for token in range(9):
        sent.append(told(step(coalescer, [SequenceOutput(n, [token]) for n in range(64)])))
        clock.now += 0.02
    together = {number: outputs for number, outputs in enumerate(sent) if outputs}
    assert {number: outputs[5] for number, outputs in together.items()} == {
        0: (5, [0]),
        4: (5, [1, 2, 3, 4]),
        8: (5, [5, 6, 7, 8]),
    }
    assert all(len(outputs) == 64 for outputs in together.values())


def test_what_waits_says_when_it_is_due() -> None:
    clock = Clock()
    coalescer = Coalescer(RATE, clock)
    step(coalescer, [SequenceOutput(n, [1]) for n in range(50)])
    assert coalescer.seconds_left is None
    clock.now += 0.01
    assert step(coalescer, [SequenceOutput(7, [2])]) == []
    assert coalescer.seconds_left == pytest.approx(0.04)
    clock.now += 0.05
    assert coalescer.seconds_left == 0.0
    assert told(coalescer.take_due()) == [(7, [2])]


def test_no_token_waits_for_longer_than_the_longest_time() -> None:
    clock = Clock()
    coalescer = Coalescer(1.0, clock)
    step(coalescer, [SequenceOutput(n, [1]) for n in range(50)])
    step(coalescer, [SequenceOutput(7, [2])])
    assert coalescer.seconds_left == pytest.approx(LONGEST_SECONDS)


@pytest.mark.parametrize(
    "awaited",
    [
        SequenceOutput(7, [3], timing=SequenceTiming()),
        SequenceOutput(7, [3], finish_reason=FinishReason.LENGTH),
    ],
    ids=["timing", "end"],
)
def test_what_somebody_waits_for_passes_with_all_before_it(awaited: SequenceOutput) -> None:
    coalescer = Coalescer(RATE, Clock())
    step(coalescer, [SequenceOutput(n, [1]) for n in range(50)])
    assert step(coalescer, [SequenceOutput(7, [2]), SequenceOutput(8, [2])]) == []
    assert list(coalescer.take(awaited)) == [awaited]
    assert awaited.token_ids == [2, 3]
    assert coalescer.seconds_left is not None  # the other one goes on waiting
    assert coalescer.take(SequenceOutput(8, [3]), at_once=True)[0].token_ids == [2, 3]
    assert coalescer.seconds_left is None


@pytest.mark.parametrize(
    "end",
    [
        SequenceOutput(7, [], finish_reason=FinishReason.ERROR, error="no memory"),
        SequenceOutput(7, [], given_back=GivenBack("no memory")),
    ],
    ids=["error", "given-back"],
)
def test_an_end_without_tokens_comes_behind_what_waits(end: SequenceOutput) -> None:
    """A failure says nothing of the tokens before it: they are sent."""
    coalescer = Coalescer(RATE, Clock())
    step(coalescer, [SequenceOutput(n, [1]) for n in range(50)])
    assert step(coalescer, [SequenceOutput(7, [2])]) == []
    assert told(coalescer.take(end)) == [(7, [2]), (7, [])]


def test_log_probabilities_stay_with_their_tokens() -> None:
    coalescer = Coalescer(RATE, Clock())
    step(coalescer, [SequenceOutput(n, [1]) for n in range(50)])
    for token in (2, 3):
        logprob = TokenLogprob(token_id=token, logprob=-float(token), rank=1)
        step(coalescer, [SequenceOutput(7, [token], [logprob])])
    (output,) = coalescer.take(
        SequenceOutput(7, [4], [TokenLogprob(token_id=4, logprob=-4.0, rank=1)]), True
    )
    assert [each.token_id for each in output.logprobs or ()] == output.token_ids == [2, 3, 4]


@pytest.mark.parametrize("_round", range(5))
def test_nothing_is_lost_or_late_and_events_are_few(_round: int, seed: int) -> None:
    """Random streams, steps and ends."""
    draw, clock = random.Random(seed), Clock()
    coalescer = Coalescer(RATE, clock)
    made: dict[int, list[int]] = defaultdict(list)
    sent: dict[int, list[int]] = defaultdict(list)
    came_at: dict[int, float] = {}
    running: list[int] = []
    num_due = 0
    started = clock.now
    for number in range(600):
        if draw.random() < 0.3 and len(running) < 80:
            running.append(number)
        outputs = []
        for sequence_id in list(running):
            tokens = [draw.randrange(100) for _ in range(draw.choice([1, 1, 1, 4]))]
            output = SequenceOutput(sequence_id, tokens)
            if not made[sequence_id]:
                output.timing = SequenceTiming()
            if draw.random() < 0.005:
                output.finish_reason = FinishReason.STOP
                running.remove(sequence_id)
            made[sequence_id] += tokens
            came_at.setdefault(sequence_id, clock.now)
            outputs.append(output)
        at_once = [each for output in outputs for each in coalescer.take(output)]
        due = coalescer.take_due()
        num_due += len(due)
        for output in at_once + due:
            sent[output.sequence_id] += output.token_ids
            came_at.pop(output.sequence_id, None)
        longest = max((clock.now - at for at in came_at.values()), default=0.0)
        assert longest <= LONGEST_SECONDS
        if draw.random() < 0.5 and (left := coalescer.seconds_left) is not None:
            clock.now += min(left, 0.01)  # as the timer of who waits would
        else:
            clock.now += draw.uniform(0.001, 0.02)
    assert num_due <= RATE * (clock.now - started) + 80
    clock.now += LONGEST_SECONDS
    for output in coalescer.take_due():
        sent[output.sequence_id] += output.token_ids
    assert sent == made
