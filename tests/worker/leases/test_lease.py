"""A claim becomes a sequence for the engine, and later rows."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.request import FinishReason
from promptq.worker.engine.api.messages import SequenceTiming
from promptq.worker.leases.lease import Lease
from promptq.worker.leases.rows import PreparedRequest
from promptq.worker.text.tokenizer import HuggingFaceTokenizer
from tests.worker.leases.world import END, claim, emitted, preparation
from tests.worker.text.families import sentence_piece


def prepare(events: list[TokenEvent] | None = None, **fields: Any) -> PreparedRequest:
    return preparation().prepare(claim(events, **fields))


def test_a_sequence_gets_what_the_request_says() -> None:
    held = prepare(priority=-3, cache_salt="s", seed=5, stop_token_ids=[7], bad_words=["ab"])
    request = held.engine_request
    assert request.prompt_token_ids == list(b"four")
    assert (request.priority, request.cache_salt, request.seed) == (-3, "s", 5)
    assert request.order == (5.0, "r")
    assert request.end_token_ids == {7, END}
    assert request.bad_token_sequences == ((97, 98),)
    assert request.max_tokens == 16, "what the model's length leaves"


def test_what_the_request_leaves_open_is_settled_here() -> None:
    assert prepare().engine_request.seed == 77
    assert prepare(ignore_eos=True, stop_token_ids=[7]).engine_request.end_token_ids == {7}
    assert prepare(max_tokens=3).engine_request.max_tokens == 3
    assert prepare(max_tokens=300).engine_request.max_tokens == 16
    assert prepare().sequence_id != prepare().sequence_id


def test_bad_words_that_no_output_has_room_for_are_left_out() -> None:
    words = ["a" * length for length in (2, 5, 6, 16, 17, 256)]
    lengths = [len(it) for it in prepare(bad_words=words).engine_request.bad_token_sequences]
    assert lengths == [2, 5, 6, 16]
    held = prepare(emitted("abc"), bad_words=words, max_tokens=5)
    assert [len(it) for it in held.engine_request.bad_token_sequences] == [2, 5]


@pytest.mark.parametrize("length", [20, 30])
def test_a_prompt_must_leave_room_for_an_answer(length: int) -> None:
    with pytest.raises(
        InvalidRequestError,
        match="^prompt: the prompt is too long: this model's maximum context length is 20 tokens,"
        f" of which at most 19 can be the prompt; this one has {length}",
    ):
        prepare(prompt="x" * length)
    assert prepare(prompt="x" * 19).engine_request.max_tokens == 1


def test_an_empty_prompt_is_what_the_tokenizer_puts_in_front_of_a_text() -> None:
    """If that is nothing, there is nothing to continue."""
    tokenizer = HuggingFaceTokenizer(sentence_piece(adds_bos=True))
    held = replace(preparation(), tokenizer=tokenizer).prepare(claim(prompt=""))
    assert held.engine_request.prompt_token_ids == [1]
    for fields, why in (
        ({}, "is empty, and this model's tokenizer puts no token in front of a text, so there is"),
        ({"embed": {}}, "is empty, so there is nothing to embed"),
        ({"prompt": []}, "has no tokens, so there is nothing to continue"),
    ):
        with pytest.raises(InvalidRequestError, match=f"^prompt: {why}"):
            prepare(**{"prompt": "", **fields})


def test_refuses_another_model_by_name() -> None:
    assert prepare(model="mine").priority == 0
    with pytest.raises(InvalidRequestError, match=r"^model: this queue serves 'mine', not 'other'"):
        prepare(model="other")


@pytest.mark.parametrize(
    ("abilities", "fields"),
    [
        ({"logprobs": False}, {"logprobs": 0}),
        ({"unheeded": frozenset({"min_p", "top_k"})}, {"top_k": 3}),
        ({"grammars": False}, {"response_format": {"type": "json_object"}}),
    ],
)
def test_what_an_engine_cannot_do_is_refused_by_name(
    abilities: dict[str, Any], fields: dict[str, Any]
) -> None:
    (name,) = fields
    with pytest.raises(
        InvalidRequestError, match=f"^{name}: no live worker's engine serves it"
    ) as refused:
        preparation(**abilities).prepare(claim(**fields))
    assert (refused.value.field, refused.value.error_type) == (name, "unsupported")
    preparation(**abilities).prepare(claim(logprobs=None, top_k=0))


def test_a_penalty_that_would_not_count_a_prefix_is_refused_by_name() -> None:
    """That random numbers begin anew refuses nothing, as none were drawn for it."""
    abilities = {"inexact_with": frozenset({"temperature", "presence_penalty"})}
    given = {"output_prefix": {"text": "ab"}}
    with pytest.raises(
        InvalidRequestError, match=r"^presence_penalty: .* output_prefix"
    ) as refused:
        preparation(**abilities).prepare(claim(**given, presence_penalty=1.0))
    assert refused.value.error_type == "unsupported"
    preparation(**abilities).prepare(claim(**given))
    preparation(**abilities).prepare(claim(presence_penalty=1.0))


def test_a_prefix_is_the_first_row_and_counts_beside_max_tokens() -> None:
    """Also for a later attempt, which does not send it again."""
    fields: dict[str, Any] = {"output_prefix": {"token_ids": [97], "text": "b"}, "max_tokens": 5}
    first, later = prepare(**fields), prepare(emitted("abc"), **fields)
    for held, output in ((first, "ab"), (later, "abc")):
        assert held.engine_request.output_token_ids == list(output.encode())
        assert held.engine_request.max_tokens == 7
    lease = Lease(first.claim, prepared_or_none=first)
    rows = lease.with_unsent(first.next_row([99], "c"))
    assert [(it.start, it.end) for it in rows] == [(0, 2), (2, 3)]
    lease = Lease(later.claim, prepared_or_none=later)
    assert lease.with_unsent(row := later.next_row([100], "d")) == [row]
    assert (row.start, row.end) == (3, 4)
    assert prepare(**{**fields, "output_prefix": {"token_ids": [97, END]}}).token_ids == [97]


def test_a_later_attempt_goes_on_behind_what_was_emitted() -> None:
    held = prepare(emitted("ab"), max_tokens=5)
    assert held.engine_request.output_token_ids == [97, 98]
    assert held.engine_request.max_tokens == 5, "over all attempts"
    assert not held.is_at_end
    row = held.next_row([99], "c")
    event = TokenEvent.model_validate_json(row.event_json)
    assert (event.index, event.attempt, row.start, row.fence) == (2, 2, 2, "2-x")


def test_knows_when_nothing_is_left_to_generate() -> None:
    assert prepare(emitted("abcde"), max_tokens=5).is_at_end
    assert prepare(emitted("ab!"), stop="!").is_at_end
    assert not prepare(emitted("abcd"), max_tokens=5).is_at_end


def test_counts_with_what_was_expected_or_what_it_has_if_that_is_more() -> None:
    held = prepare(emitted("ab"))
    assert held.kv_need == 9
    for character in "cdefgh":
        held.next_row([ord(character)], character)
    assert held.kv_need == 4 + 8


def test_the_last_row_brings_usage_stats_and_the_whole_result() -> None:
    now = time.monotonic()
    claimed = claim(emitted("ab"))
    claimed.received_at = now - 2.0  # what preparation takes counts as time in the queue
    held = preparation().prepare(claimed)
    assert held.claim.server_ms(now) == 1500 + 2000
    held.timing = SequenceTiming(
        scheduled_at=now - 1.5,
        first_token_at=now - 1.0,
        cached_tokens=3,
        recomputed_tokens=2,
        preemptions=1,
    )
    held.next_row([99], "c")
    row = held.next_row([100], "d", finish_reason=FinishReason.STOP)
    seconds = time.monotonic() - now
    event = TokenEvent.model_validate_json(row.event_json)
    usage, stats = event.usage, event.stats
    assert usage is not None
    assert stats is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (4, 4, 3)
    assert stats.queue_ms == pytest.approx(500 + 500, abs=5)
    assert stats.prompt_ms == pytest.approx(500, abs=5)
    assert 1000 <= stats.generation_ms <= 1000 + seconds * 1000
    rate = 1000 / stats.generation_ms
    assert stats.tokens_per_second == pytest.approx(rate), "of this attempt: one after first"
    assert (stats.attempts, stats.preemptions, stats.recomputed_tokens) == (2, 1, 2)
    result = json.loads(row.result_json)
    assert (result["text"], result["token_ids"]) == ("abcd", [97, 98, 99, 100])
