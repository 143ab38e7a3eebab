"""Several calls of a server give the output of one, with penalties and at low temperatures.

The server is one function: a small model, with vLLM's rules of what a call counts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.events import TokenLogprob, TopLogprob
from promptq.shared.protocol.request import FinishReason, SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.upstream.dialects.dialect import (
    Chunk,
    Continuation,
    ServerDescription,
    abilities_of,
)
from promptq.worker.upstream.dialects.openai_completions import OpenAIDialect
from promptq.worker.upstream.dialects.transport import Server, UnusableAnswerError
from promptq.worker.upstream.dialects.vllm import _MOST_STOPS, VllmDialect
from promptq.worker.upstream.probing import describe
from promptq.worker.upstream.watched_stream import WatchedStream
from tests.worker.leases.test_lease import claim, preparation

_VOCABULARY = 256


class Model(VllmDialect):
    """Prefers few tokens, so that penalties count. `raw` replaces its logits."""

    def __init__(
        self,
        raw: Sequence[float] | None = None,
        *,
        keeps_seeds: bool = False,
        varies: bool = False,
        states: bool = False,
        reports: bool = True,
        **more: bool,
    ) -> None:
        """`keeps_seeds`: random numbers depend on seed and position, as on a GPU. `varies`:
        log-probabilities after a prefill differ a little. `states`: that a batch does not change
        its logits. `reports`: log-probabilities."""
        super().__init__(**more)
        self.abilities = replace(self.abilities, logprobs=reports)
        self.states = states
        self.raw, self.num_calls = raw, 0
        self.keeps_seeds, self.varies = keeps_seeds, varies

    def logits(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        if self.raw is not None:
            return np.array(self.raw)
        rng = np.random.default_rng((tokens[-1], len(tokens) % 3))
        return rng.normal(size=_VOCABULARY) + np.linspace(6.0, 0.0, _VOCABULARY)

    async def generate(self, server: Server, wanted: Continuation) -> AsyncGenerator[Chunk]:
        self.num_calls += 1
        request, emitted, mask = wanted.request, wanted.emitted, wanted.mask
        params, new = request.params, list[int]()
        rng = np.random.default_rng((request.seed, len(emitted)))
        while len(emitted) + len(new) < request.max_tokens:
            raw = self.logits([*request.prompt_token_ids, *emitted, *new])
            if self.keeps_seeds:
                rng = np.random.default_rng((request.seed, len(emitted) + len(new)))
            if self.varies:
                raw = raw + 1e-6 * len(emitted)
            logits = raw.copy()
            for name, by in (params.logit_bias or {}).items():
                logits[int(name)] += by
            for token, times in Counter(new).items():
                logits[token] -= params.presence_penalty + times * params.frequency_penalty
            if mask is not None:
                logits[~mask.allowed] = -np.inf
                assert not new, "a choice is one token"
            if params.temperature:
                logits = logits / max(0.01, params.temperature) + rng.gumbel(size=len(logits))
            new.append(int(logits.argmax()))
            likeliest = raw.argsort()[::-1][: params.logprobs or 0]
            entry = TokenLogprob(
                token_id=new[-1],
                logprob=raw[new[-1]],
                rank=1,
                top=[TopLogprob(token_id=token, logprob=raw[token]) for token in likeliest] or None,
            )
            yield Chunk([new[-1]], [entry] if params.logprobs is not None else None)

    async def describe(self, server: Server) -> ServerDescription:
        return ServerDescription("vLLM", "m", 1024, is_invariant=self.states)


async def output_of(model: Model, request: EngineRequest) -> list[int]:
    emitted = request.output_token_ids
    stream = WatchedStream(
        model,
        NOWHERE,
        request,
        emitted,
        replace(await model.describe(NOWHERE), keeps_seeds=model.keeps_seeds),
        len(model.logits([0])),
    )
    chunks = [chunk async for chunk in stream.chunks()]
    if request.params.logprobs is None:
        assert not any(chunk.logprobs for chunk in chunks)
    else:
        assert all(
            len(entry.top or ()) == request.params.logprobs
            for chunk in chunks
            for entry in chunk.logprobs or ()
        )
    return [*emitted, *(token for chunk in chunks for token in chunk.token_ids)]


NOWHERE: Any = SimpleNamespace(idle_seconds=60.0, url="")


class EndingModel(Model):
    """Ends at each token below 4, as llama.cpp ends at the model's end token."""

    def __init__(self, *, names_its_end: bool) -> None:
        super().__init__()
        self.names_its_end = names_its_end

    async def generate(self, server: Server, wanted: Continuation) -> AsyncGenerator[Chunk]:
        async for chunk in super().generate(server, wanted):
            if chunk.token_ids[0] >= 4 or self.names_its_end:
                yield chunk
            if chunk.token_ids[0] < 4:
                yield Chunk([], finish_reason=FinishReason.STOP)
                return


@pytest.mark.parametrize("ends", [(), (3, 200)])
async def test_an_output_goes_on_after_end_tokens_that_the_request_ignores(
    ends: tuple[int, ...],
) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=not ends)
    request = EngineRequest(1, [7], params, seed=0, max_tokens=40, end_token_ids=frozenset(ends))
    whole = await output_of(Model(), request)
    model = EndingModel(names_its_end=True)
    assert await output_of(model, request) == whole
    num_ends = sum(token < 4 for token in whole[:-1])
    assert model.num_calls == 1 + num_ends > 1
    with pytest.raises(UnusableAnswerError, match="without its end token"):
        await output_of(EndingModel(names_its_end=False), request)


class EndingUnderMasks(Model):
    async def generate(self, server: Server, wanted: Continuation) -> AsyncGenerator[Chunk]:
        if wanted.mask is not None:
            yield Chunk([], finish_reason=FinishReason.STOP)
            return
        async for chunk in super().generate(server, wanted):
            yield chunk


async def test_only_a_server_that_cannot_ignore_end_tokens_ends_without_one() -> None:
    """The others would be called again and again."""
    params = SamplingParams(temperature=0.0)
    request = EngineRequest(1, [7], params, seed=0, max_tokens=40)
    whole = await output_of(Model(), request)
    banned = replace(request, bad_token_sequences=((whole[3],),))
    model = EndingUnderMasks()
    with pytest.raises(UnusableAnswerError, match="chose no token"):
        await output_of(model, banned)
    abilities = model.abilities
    model.abilities = replace(abilities, unheeded=abilities.unheeded | {"ignore_eos"})
    assert await output_of(model, banned) == whole[: whole.index(whole[3])]


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"presence_penalty": -0.4, "frequency_penalty": 0.9},
        {"presence_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {"3": 2.0, "5": -1.0}},
    ],
)
async def test_penalties_count_the_tokens_of_all_calls(fields: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.0, **fields)
    request = EngineRequest(1, [7], params, seed=0, max_tokens=40)
    whole = await output_of(Model(), request)
    assert len({*whole}) < len(whole) == 40
    for length in (1, 7, 20, 39):
        model = Model()
        assert await output_of(model, replace(request, output_token_ids=whole[:length])) == whole
        assert model.num_calls == 1 or "presence_penalty" in fields
    plain = params.model_copy(update={"presence_penalty": 0.0, "frequency_penalty": 0.0})
    assert await output_of(Model(), replace(request, params=plain)) != whole


async def test_penalties_count_behind_a_token_that_a_rule_forbids() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=1.1, frequency_penalty=0.4)
    request = EngineRequest(1, [7], params, seed=0, max_tokens=40)
    (common, _), *_ = Counter(await output_of(Model(), request)).most_common()
    banned = replace(request, bad_token_sequences=((common,),))
    as_bias = params.model_copy(update={"logit_bias": {str(common): -100.0}})
    wanted = await output_of(Model(), replace(request, params=as_bias))
    assert common not in wanted
    assert await output_of(Model(), banned) == wanted


async def test_draws_below_the_servers_lowest_temperature_have_the_right_odds() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    raw, temperature, num_tokens = [0.0, -0.002, -0.004, -0.01, -9.0], 0.004, 4000
    params = SamplingParams(temperature=temperature, logprobs=2)
    model = Model(raw)
    output = await output_of(model, EngineRequest(1, [0], params, seed=seed, max_tokens=num_tokens))
    odds = np.exp(np.array(raw) / temperature)
    expected = odds / odds.sum()
    found = np.bincount(output, minlength=len(raw)) / num_tokens
    assert model.num_calls > 100, "some draws are rejected"
    assert found[4] == 0
    error = np.sqrt(expected * (1 - expected) / num_tokens)
    assert (np.abs(found - expected)[:4] < 5 * error[:4]).all(), (found, expected)
    as_server = np.exp(np.array(raw) / 0.01)
    assert (np.abs(found - as_server / as_server.sum()) > 5 * error).any(), "the test sees it"


async def test_a_server_whose_report_contradicts_its_draws_is_not_called_for_ever() -> None:
    class Contradicting(Model):
        async def generate(self, server: Server, wanted: Continuation) -> AsyncGenerator[Chunk]:
            async for chunk in super().generate(server, wanted):
                for entry in chunk.logprobs or ():
                    entry.logprob = -50.0
                yield chunk

    params = SamplingParams(temperature=0.001)
    with pytest.raises(UnusableAnswerError, match="contradict"):
        await output_of(
            Contradicting([0.0, 0.001]), EngineRequest(1, [0], params, seed=1, max_tokens=3)
        )


async def test_a_draw_without_a_report_is_not_taken_for_a_right_one() -> None:
    class Silent(Model):
        async def generate(self, server: Server, wanted: Continuation) -> AsyncGenerator[Chunk]:
            async for chunk in super().generate(server, wanted):
                chunk.logprobs = None
                yield chunk

    params = SamplingParams(temperature=0.001)
    with pytest.raises(UnusableAnswerError, match="a log-probability is missing"):
        await output_of(Silent([0.0, 0.001]), EngineRequest(1, [0], params, seed=1, max_tokens=3))


ABILITIES: dict[str, Any] = {
    name: getattr(VllmDialect().abilities, name)
    for name in ("lowest_temperature", "most_biases", "inexact_with")
}


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.001, "top_p": 0.9},
        {"temperature": 0.001, "min_tokens": 3},
        {"temperature": 0.001, "response_format": {"type": "json_object"}},
        {"presence_penalty": 1.0, "repetition_penalty": 1.1, "output_prefix": {"text": "ab"}},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.1, "bad_words": ["fox"]},
    ],
)
def test_fields_that_spoil_each_other_are_refused_together(fields: dict[str, Any]) -> None:
    first, *_ = fields
    with pytest.raises(InvalidRequestError, match=f"^{first}: ") as refused:
        preparation(**ABILITIES).prepare(claim(**fields))
    assert refused.value.error_type == "unsupported"
    preparation(**ABILITIES).prepare(claim(**{first: fields[first]}))


def test_more_tokens_than_a_server_biases_are_not_continued_exactly() -> None:
    abilities, few = OpenAIDialect(is_exact=True).abilities, range(300)
    params = SamplingParams(temperature=0.0, presence_penalty=1.0)
    assert abilities.resumes_exactly(params, few)
    assert not abilities.resumes_exactly(params, range(301))
    biased = params.model_copy(update={"logit_bias": {"300": 1.0}})
    assert not abilities.resumes_exactly(biased, few)
    assert abilities.may_preempt(params, few)
    assert not abilities.may_preempt(params, range(301))


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_a_server_gets_no_more_stop_ids_than_it_survives(min_tokens: int) -> None:
    """The worker ends streams at the others."""
    params = SamplingParams(min_tokens=min_tokens)
    request = EngineRequest(1, [0], params, 0, 9, end_token_ids=frozenset(range(257)))
    body = VllmDialect()._body(Continuation(request, (), "m"))
    assert len(body["sampling_params"]["stop_token_ids"]) == _MOST_STOPS


@pytest.mark.parametrize("keeps_seeds", [True, False])
async def test_sampled_outputs_continue_exactly_where_a_probe_shows_it(keeps_seeds: bool) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    model = Model(keeps_seeds=keeps_seeds, is_exact=True)
    abilities = abilities_of(model, await describe(model, NOWHERE))
    params = SamplingParams(temperature=1.0, presence_penalty=0.8)
    assert abilities.resumes_exactly(params) is keeps_seeds
    assert not abilities.resumes_exactly(SamplingParams(temperature=0.005))
    banned = tuple((token_id,) for token_id in range(0, _VOCABULARY, 5))
    for bad in ((), banned):
        request = EngineRequest(1, [7], params, seed, 40, bad_token_sequences=bad)
        whole = await output_of(model, request)
        assert not {(token_id,) for token_id in whole} & {*bad}
        for length in (1, 20, 39):
            again = await output_of(model, replace(request, output_token_ids=whole[:length]))
            assert keeps_seeds <= (again == whole)
    assert await output_of(model, replace(request, seed=seed + 1)) != whole


async def test_a_sequence_that_is_masked_draws_what_a_mask_on_each_token_would_draw() -> None:
    model = Model(keeps_seeds=True, is_exact=True)
    params = SamplingParams(temperature=1.0)
    banned = [*range(0, _VOCABULARY, 5)]
    request = EngineRequest(1, [7], params, 5, 40)
    watched = replace(request, bad_token_sequences=tuple((token_id,) for token_id in banned))
    as_bias = params.model_copy(update={"logit_bias": dict.fromkeys(map(str, banned), -100.0)})
    assert await output_of(model, watched) == await output_of(
        model, replace(request, params=as_bias)
    )


@pytest.mark.parametrize(
    ("stated", "more", "is_exact"),
    [
        ("1", {"keeps_seeds": True}, True),
        ("0", {"keeps_seeds": True}, False),
        ("1", {"keeps_seeds": True, "varies": True}, False),
        ("1", {}, False),
        ("0", {"keeps_seeds": True, "states": True}, True),
        ("0", {"keeps_seeds": True, "states": True, "varies": True}, False),
        ("0", {"keeps_seeds": True, "states": True, "reports": False}, True),
        ("0", {"states": True, "reports": False}, False),
    ],
)
async def test_invariance_is_a_promise_where_it_is_stated_and_not_contradicted(
    monkeypatch: pytest.MonkeyPatch, stated: str, more: dict[str, bool], is_exact: bool
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", stated)
    model = Model(**more)
    abilities = abilities_of(model, await describe(model, NOWHERE))
    assert abilities.resumes_exactly(SamplingParams(temperature=1.0)) is is_exact
    assert abilities.resumes_exactly(SamplingParams(temperature=0.0)) is is_exact


async def test_a_model_that_leaves_no_choice_shows_nothing_about_seeds() -> None:
    model = Model([90.0] + [0.0] * (_VOCABULARY - 1), is_exact=True)
    assert not (await describe(model, NOWHERE)).keeps_seeds
