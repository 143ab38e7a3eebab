"""The sampler against the library's processors, a full sort, and plain arithmetic."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from promptq.shared.protocol.events import TokenLogprob
from promptq.shared.protocol.request import NEUTRAL, SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.core.runner import SampledToken
from promptq.worker.engine.core.sequence import Sequence
from promptq.worker.engine.native.build import NativeCodeError
from promptq.worker.engine.native.library import load_native
from promptq.worker.engine.sampling import draw as drawing
from promptq.worker.engine.sampling import filters
from promptq.worker.engine.sampling.constraints import Constraints
from promptq.worker.engine.sampling.draw import draw
from promptq.worker.engine.sampling.filters import FILTERS, Filters
from promptq.worker.engine.sampling.penalties import Penalties
from promptq.worker.engine.sampling.randomness import streams, uniforms
from promptq.worker.engine.sampling.sampler import Sampler

SEED = 5
CPU = torch.device("cpu")
_ids = count(1)


def sequence(
    prompt: list[int],
    output: list[int] | None = None,
    *,
    seed: int = 0,
    end_token_ids: tuple[int, ...] = (),
    bad_token_sequences: tuple[tuple[int, ...], ...] = (),
    **params: Any,
) -> Sequence:
    request = EngineRequest(
        next(_ids),
        prompt,
        SamplingParams(**params),
        seed=seed,
        max_tokens=1000,
        end_token_ids=frozenset(end_token_ids),
        bad_token_sequences=bad_token_sequences,
        output_token_ids=output or [],
    )
    return Sequence.of(request)


@pytest.fixture(params=[False, True], ids=["torch", "native"])
def native(request: pytest.FixtureRequest) -> bool:
    """Whether the native code samples; all that is true of one is true of the other."""
    if request.param:
        require_native()
    return bool(request.param)


def require_native() -> None:
    try:
        load_native()
    except NativeCodeError as error:
        pytest.skip(f"no native code: {error}")


def sample(logits: torch.Tensor, sequences: list[Sequence], native: bool) -> list[SampledToken]:
    sampler = Sampler(logits.shape[1], CPU, native=native)
    return sampler.sample(logits, sequences).tokens()


def token_ids(logits: torch.Tensor, sequences: list[Sequence], native: bool) -> list[int]:
    tokens = sample(logits, sequences, native)
    assert [token.error for token in tokens] == [None] * len(tokens)
    return [token.token_id for token in tokens]


def random_logits(
    rows: int, vocab_size: int, seed: int = SEED, spread: float = 3.0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * spread


DRAWN: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "temperature": lambda random, _: random.choice([float(random.uniform(0.2, 2.0)), 0.0]),
    "top_p": lambda random, _: float(random.uniform(0.05, 0.99)),
    "top_k": lambda random, vocab_size: int(
        random.choice([random.integers(-1, 5), random.integers(vocab_size + 50)])
    ),
    "min_p": lambda random, _: float(random.uniform(0.0, 0.2)),
    "repetition_penalty": lambda random, _: float(random.uniform(0.5, 2.0)),
    "presence_penalty": lambda random, _: float(random.uniform(-2, 2)),
    "frequency_penalty": lambda random, _: float(random.uniform(-2, 2)),
    "logit_bias": lambda random, vocab_size: {
        str(token): float(random.uniform(-5, 5)) for token in some_tokens(random, vocab_size, 6)
    },
    "min_tokens": lambda random, _: 20,
}
"""A value of each field that changes what the sampler chooses."""

NOT_DRAWN = {
    "max_tokens", "stop", "stop_token_ids", "ignore_eos",  # of the end alone
    "seed", "bad_words", "response_format",  # are something else by the time a token is chosen
    "logprobs", "prompt_logprobs", "speculative_tokens",  # change no token
}  # fmt: skip


def some_tokens(random: np.random.Generator, vocab_size: int, most: int) -> list[int]:
    return random.integers(0, vocab_size, random.integers(1, most)).tolist()


def random_sequences(rows: int, vocab_size: int, seed: int = SEED) -> list[Sequence]:
    """Every mixture of parameters."""
    random = np.random.default_rng(seed)
    sequences = []
    for _ in range(rows):
        asked = [name for name in DRAWN if random.random() < 0.5]
        sequences.append(
            sequence(
                some_tokens(random, vocab_size, 40),
                some_tokens(random, vocab_size, 30) if random.random() < 0.7 else [],
                seed=int(random.integers(0, 2**63)),
                end_token_ids=(3, 4),
                bad_token_sequences=((5,), (6, 7), (8, 9, 10)) if random.random() < 0.5 else (),
                **{name: DRAWN[name](random, vocab_size) for name in asked},
            )
        )
        if random.random() < 0.5:
            sequences[-1].token_ids += [8, 9]
    return sequences


def with_params(row: Sequence, **changed: Any) -> Sequence:
    """Returns the row with these parameters changed."""
    params = row.request.params.model_copy(update=changed)
    other = Sequence.of(replace(row.request, sequence_id=next(_ids), params=params))
    other.token_ids = [*row.token_ids]
    return other


def test_random_rows_have_every_parameter() -> None:
    assert DRAWN.keys() | NOT_DRAWN == SamplingParams.model_fields.keys()
    assert not DRAWN.keys() & NOT_DRAWN


@pytest.mark.parametrize("name", DRAWN)
def test_every_parameter_counts(name: str, native: bool) -> None:
    """Were it not looked at, the rows would get the tokens that they get without it."""
    vocab_size = 40
    logits = random_logits(300, vocab_size)
    sequences = random_sequences(300, vocab_size)
    neutral = [with_params(row, **{name: getattr(NEUTRAL, name)}) for row in sequences]
    assert token_ids(logits, sequences, native) != token_ids(logits, neutral, native)


def reference(logits: torch.Tensor, row: Sequence) -> torch.Tensor:
    """Returns `logits` [vocab_size] before the softmax; -inf for tokens that cannot be chosen."""
    params = row.request.params
    scores = logits.clone().float()
    output = row.token_ids[row.num_prompt_tokens :]
    if len(output) < params.min_tokens:
        scores[list(row.request.end_token_ids)] = -math.inf
    for *prefix, last in row.request.bad_token_sequences:
        if output[len(output) - len(prefix) :] == prefix and len(output) >= len(prefix):
            scores[last] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        scores[int(token)] += bias
    scores = scores.unsqueeze(0)
    penalty = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    scores = penalty(torch.tensor([row.token_ids]), scores)
    for token in set(output):
        scores[0, token] -= params.frequency_penalty * output.count(token)
        scores[0, token] -= params.presence_penalty
    if params.temperature == 0.0:
        return scores[0]
    scores = TemperatureLogitsWarper(params.temperature)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return scores[0]


def assert_is_drawn(token: int, scores: torch.Tensor, row: Sequence) -> None:
    """The token is where the row's number falls in the cumulative distribution."""
    assert scores[token] > -math.inf
    if row.request.params.temperature == 0.0:
        assert token == int(scores.argmax())
        return
    cumulative = scores.double().softmax(dim=0).cumsum(dim=0)
    seed, position = (np.array([n], dtype=np.uint64) for n in (row.request.seed, row.num_tokens))
    number = uniforms(streams(seed), position)[0]
    before = float(cumulative[token - 1]) if token else 0.0
    assert before - 1e-5 <= number <= float(cumulative[token]) + 1e-5


@pytest.mark.parametrize("vocab_size", [97, 256, 2000])
def test_equals_the_librarys_processors(vocab_size: int, native: bool) -> None:
    rows = 120
    logits = random_logits(rows, vocab_size)
    sequences = random_sequences(rows, vocab_size)
    tokens = token_ids(logits, sequences, native)
    for token, scores, row in zip(tokens, logits, sequences, strict=True):
        assert_is_drawn(token, reference(scores, row), row)
    assert len(set(tokens)) > 20


@pytest.mark.matrix(8)
@pytest.mark.parametrize("vocab_size", [1, 128, 5000, 40_000])
@pytest.mark.parametrize("spread", [0.1, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_code_gives_what_torch_gives(
    vocab_size: int, spread: float, dtype: torch.dtype
) -> None:
    """But for rounding, which may move the border between two tokens of a flat distribution."""
    require_native()
    rows = 200
    logits = random_logits(rows, vocab_size, spread=spread).to(dtype)
    random = np.random.default_rng(SEED)
    extreme: dict[str, list[Any]] = {
        "temperature": [0.0, 1e-50, 0.3, 1.0, 2.0],
        "top_p": [1e-9, 0.3, 0.9, 0.9999, 1 - 1e-16, 1.0],
        "top_k": [-1, 0, 1, 20, 130, 3000, vocab_size // 2, vocab_size, 2**70],
        "min_p": [0.0, 1e-30, 0.02, 1.0],
        "logprobs": [0, 1, 20],
    }
    assert extreme.keys() >= {*FILTERS}
    sequences = [
        sequence(
            [1],
            seed=row,
            **{name: values[random.integers(len(values))] for name, values in extreme.items()},
        )
        for row in range(rows)
    ]
    tokens = [sample(logits, sequences, native) for native in (False, True)]
    differing = 0
    for scores, torchs, natives in zip(logits, *tokens, strict=True):
        assert natives.error is None
        if torchs.token_id != natives.token_id:
            differing += 1
            continue
        assert torchs.logprob is not None
        assert natives.logprob is not None
        assert natives.logprob.logprob == pytest.approx(torchs.logprob.logprob, abs=1e-5)
        assert natives.logprob.rank == torchs.logprob.rank
        top = natives.logprob.top or []
        assert [each.logprob for each in top] == pytest.approx(
            [each.logprob for each in torchs.logprob.top or []], abs=1e-5
        )
        # Which of equal logits come first is open.
        ids = [each.token_id for each in top]
        assert torch.equal(scores[ids], scores.topk(len(ids)).values)
        assert len(set(ids)) == len(ids)
    assert differing <= rows // 100


def test_penalties_and_constraints_change_just_what_they_should() -> None:
    """Every logit, not only the chosen one."""
    vocab_size = 80
    logits = random_logits(60, vocab_size)
    sequences = random_sequences(60, vocab_size)
    changed = logits.clone()
    Constraints(sequences, vocab_size, CPU).apply(changed)
    Penalties(sequences, CPU).apply(changed)
    for scores, before, row in zip(changed, logits, sequences, strict=True):
        greedy = row.request.params.model_copy(update={"temperature": 0.0})
        row.request = replace(row.request, params=greedy)
        torch.testing.assert_close(scores, reference(before, row))


@pytest.mark.parametrize("seed", range(3))
def test_penalties_count_tokens_that_only_the_device_knows(seed: int) -> None:
    """The host learns a row's tokens at once or a step late, in turns."""
    vocab_size, rows = 80, 30
    random = np.random.default_rng(seed)
    sequences = random_sequences(rows, vocab_size, seed)
    penalties = Penalties(sequences, CPU)
    last = torch.tensor([row.token_ids[-1] for row in sequences])
    late: list[int | None] = [None] * rows  # the token that the host does not know
    for step in range(12):
        logits = random_logits(rows, vocab_size)
        on_device, on_host = logits.clone(), logits.clone()
        penalties.apply(on_device, [int(token is not None) for token in late], last)
        for row, token in zip(sequences, late, strict=True):
            row.token_ids += [] if token is None else [token]
        Penalties(sequences, CPU).apply(on_host)
        torch.testing.assert_close(on_device, on_host)
        last = torch.from_numpy(random.integers(0, vocab_size, rows))
        late = last.tolist()
        for at in random.permutation(rows)[: 0 if step % 3 == 0 else rows if step % 3 == 1 else 9]:
            sequences[at].token_ids.append(int(last[at]))
            late[at] = None


def test_penalties_that_found_no_memory_miss_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the step that failed, which is then computed again."""
    vocab_size = 80
    logits = random_logits(60, vocab_size)
    sequences = random_sequences(60, vocab_size)
    penalties = Penalties(sequences, CPU)
    penalties.apply(logits.clone())
    for row in sequences:
        row.token_ids.append(row.num_tokens % vocab_size)
    with monkeypatch.context() as short:
        short.setattr(torch, "cat", no_memory)
        with pytest.raises(MemoryError):
            penalties.apply(logits.clone())
    again, afresh = logits.clone(), logits.clone()
    penalties.apply(again)
    Penalties(sequences, CPU).apply(afresh)
    torch.testing.assert_close(again, afresh)


def no_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError("so short")


def thresholds(scaled: torch.Tensor, *asked: dict[str, Any]) -> torch.Tensor:
    """Returns the thresholds of the rows: one for all, or one for each."""
    params = [SamplingParams(**each) for each in asked] * (len(scaled) // len(asked))
    result = filters.thresholds(
        scaled, Filters(params, scaled.shape[1], CPU), torch.empty_like(scaled)
    )
    assert result is not None
    return result


def test_filters_keep_just_what_they_should() -> None:
    vocab_size = 500
    logits = random_logits(200, vocab_size)
    random = np.random.default_rng(SEED)
    asked = [
        {name: DRAWN[name](random, vocab_size) for name in FILTERS if random.random() < 0.7}
        for _ in range(200)
    ]
    scaled = logits - logits.amax(dim=1, keepdim=True)
    threshold = thresholds(scaled, *asked)
    weights = filters.weights_above(scaled, threshold, torch.empty_like(scaled))
    for row in range(200):
        kept = reference(logits[row], sequence([1], **asked[row]))
        assert torch.equal(weights[row] > 0.0, kept > -math.inf)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_works_in_fp32_whatever_the_logits_are(dtype: torch.dtype, native: bool) -> None:
    logits = random_logits(60, 500).to(dtype)
    sequences = random_sequences(60, 500)
    assert token_ids(logits, sequences, native) == token_ids(logits.float(), sequences, native)


def test_a_step_after_the_other(native: bool) -> None:
    """State that is kept from step to step equals state that is computed anew, while rows come and
    go.
    """
    vocab_size = 60
    sequences = random_sequences(12, vocab_size)
    present = sequences[:6]
    sampler = Sampler(vocab_size, CPU, native=native)
    for step in range(60):
        if step % 7 == 3:
            present = [*present[1:], sequences[(6 + step) % 12]]
            present = list(dict.fromkeys(present))
        logits = random_logits(len(present), vocab_size, seed=step)
        tokens = sampler.sample(logits, present).tokens()
        assert [token.token_id for token in tokens] == token_ids(logits, present, native)
        for row, token in zip(present, tokens, strict=True):
            row.token_ids.append(token.token_id)


def test_rows_do_not_know_of_each_other(native: bool) -> None:
    """A row gets its token alone, in any batch and in any order."""
    vocab_size = 3000
    logits = random_logits(48, vocab_size)
    sequences = random_sequences(48, vocab_size)
    together = token_ids(logits, sequences, native)
    order = np.random.default_rng(SEED).permutation(48).tolist()
    shuffled = token_ids(logits[order], [sequences[row] for row in order], native)
    assert shuffled == [together[row] for row in order]
    for row in range(48):
        assert token_ids(logits[row : row + 1], [sequences[row]], native) == [together[row]]


def test_logits_that_are_no_numbers_fail_their_row_alone(native: bool) -> None:
    vocab_size = 300
    logits = random_logits(8, vocab_size)
    everything = tuple((token,) for token in range(vocab_size))
    sequences = [sequence([1], seed=row, top_p=0.9, top_k=20) for row in range(7)]
    sequences += [sequence([1], bad_token_sequences=everything)]
    healthy = token_ids(logits[:7], sequences[:7], native)
    logits[1, 17] = math.nan
    logits[3] = math.nan
    logits[5, 2] = math.inf
    tokens = sample(logits, sequences, native)
    failed = [row for row, token in enumerate(tokens) if token.error is not None]
    assert failed == [1, 3, 5, 7]
    assert "fetch the model's files again" in (tokens[1].error or "")
    for row in (0, 2, 4, 6):
        assert tokens[row].token_id == healthy[row]

    greedy = [sequence([1], temperature=0.0, logprobs=4) for _ in range(7)]
    tokens = sample(logits[:7], greedy, native)
    assert [row for row, token in enumerate(tokens) if token.error is not None] == [1, 3, 5]
    assert tokens[0].token_id == int(logits[0].argmax())


def test_greedy_is_the_argmax(native: bool) -> None:
    logits = random_logits(5, 400)
    rows = [sequence([1], temperature=0.0) for _ in range(5)]
    assert token_ids(logits, rows, native) == logits.argmax(dim=1).tolist()


def test_min_tokens_keeps_the_end_away(native: bool) -> None:
    logits = torch.zeros(1, 10)
    logits[0, 3] = 50.0
    row = sequence([1], temperature=0.0, min_tokens=2, end_token_ids=(3, 99))
    sampler = Sampler(10, CPU, native=native)
    chosen = []
    for _ in range(3):
        [token] = sampler.sample(logits, [row]).tokens()
        chosen.append(token.token_id)
        row.token_ids.append(token.token_id)
    assert chosen[0] != 3
    assert chosen[1] != 3
    assert chosen[2] == 3


def test_bad_words_count_in_the_output_alone(native: bool) -> None:
    logits = torch.zeros(1, 10)
    logits[0, 7] = 50.0
    bad = {"bad_token_sequences": ((5, 6, 7),), "temperature": 0.0}
    assert token_ids(logits, [sequence([5, 6], **bad)], native) == [7]
    assert token_ids(logits, [sequence([5], [6], **bad)], native) == [7]
    assert token_ids(logits, [sequence([1], [5, 6], **bad)], native) != [7]
    assert token_ids(logits, [sequence([1], [6, 5], **bad)], native) == [7]


@pytest.mark.parametrize("seed", range(5))
def test_bad_words_of_all_lengths(native: bool, seed: int) -> None:
    """That begin and end alike, so that many nearly match."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(20):
        output = random.integers(0, 2, 40).tolist()
        beginnings = [
            output[40 - length :] if random.random() < 0.5 else random.integers(0, 2, length)
            for length in random.integers(0, 41, 8)
        ]
        bad = tuple((*map(int, it), int(random.integers(0, 10))) for it in beginnings)
        rows.append(sequence([0, 1], output, temperature=0.0, bad_token_sequences=bad))
    rows.append(sequence([0], temperature=0.0, bad_token_sequences=((3, 4, 5), (6,))))
    logits = random_logits(len(rows), 10, seed=seed)
    expected = [int(reference(each, row).argmax()) for each, row in zip(logits, rows, strict=True)]
    assert token_ids(logits, rows, native) == expected


def test_a_long_bad_word_takes_no_memory_for_the_short_ones() -> None:
    long, short = tuple(range(4, 104)) * 500, [(n, 1, 2) for n in range(255)]
    asking = [sequence([1], bad_token_sequences=(long, *short)) for _ in range(8)]
    tracemalloc.start()
    try:
        Constraints(asking, 300, CPU).apply(torch.zeros(8, 300))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 8 * len(asking) * (len(long) + 3 * len(short)), "what the tokens themselves take"


def test_ids_outside_of_the_vocabulary_do_no_harm(native: bool) -> None:
    row = sequence(
        [1],
        logit_bias={"10": 5.0, "99": 5.0},
        min_tokens=5,
        end_token_ids=(10, 500),
        bad_token_sequences=((10,), (1, 10), (500, 3)),
    )
    assert token_ids(torch.zeros(1, 10), [row], native)[0] in range(10)


def test_the_distribution(native: bool) -> None:
    """20,000 draws at as many positions look like the softmax of the logits."""
    vocab_size, draws = 50, 20_000
    logits = random_logits(1, vocab_size, spread=1.0)
    rows = [sequence([1] * 2, seed=9, temperature=0.8) for _ in range(draws)]
    for position, row in enumerate(rows):
        row.token_ids = range(position)  # only its length counts
    observed = np.bincount(token_ids(logits.expand(draws, -1), rows, native), minlength=vocab_size)
    expected = (logits[0].double() / 0.8).softmax(dim=0).numpy() * draws
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square < 49 + 4 * math.sqrt(2 * 49)


def test_numbers_are_a_function_of_seed_and_position() -> None:
    """Fixed for ever: other workers, and later versions, must go on with the same numbers."""
    seeds = np.array([0, 0, 1, 2**63 - 1], dtype=np.uint64)
    positions = np.array([0, 1, 0, 2**20], dtype=np.uint64)
    assert uniforms(streams(seeds), positions).tolist() == [
        0.6524484863740322,
        0.7012121095215252,
        0.36818951565166946,
        0.32491307998290764,
    ]


@pytest.mark.parametrize("by", ["seed", "position", "both"])
def test_numbers_are_even_and_unrelated(by: str) -> None:
    n = 1 << 16
    steps = np.arange(n, dtype=np.uint64)
    still = np.full(n, 12, dtype=np.uint64)
    seeds, positions = still if by == "position" else steps, still if by == "seed" else steps
    numbers = uniforms(streams(seeds), positions)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = np.bincount((numbers * 256).astype(int), minlength=256)
    assert float(((counts - n / 256) ** 2 / (n / 256)).sum()) < 255 + 4 * math.sqrt(2 * 255)
    for lag in (1, 2, 7, 256):
        assert abs(np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]) < 4 / math.sqrt(n)


def test_draw_takes_the_first_that_exceeds() -> None:
    for vocab_size in (1, 5, drawing.BLOCK, drawing.BLOCK + 1, 3 * drawing.BLOCK - 2):
        random = np.random.default_rng(vocab_size)
        weights = random.random((40, vocab_size)) * (random.random((40, vocab_size)) < 0.1)
        weights[:, random.integers(vocab_size)] = 0.5
        numbers = random.random(40)
        cumulative = weights.cumsum(axis=1)
        expected = (cumulative <= numbers[:, None] * cumulative[:, -1:]).sum(axis=1)
        drawn = draw(torch.tensor(weights), torch.tensor(numbers))
        assert drawn.tolist() == expected.tolist()


def test_draw_never_takes_what_has_no_weight() -> None:
    weights = torch.zeros(3, 1000)
    weights[:, 333] = 0.1
    weights[:, 700] = 1e-30
    numbers = torch.tensor([0.0, 1.0 - 2**-53, 1.0], dtype=torch.float64)
    assert set(draw(weights, numbers).tolist()) <= {333, 700}
    weights[:, 999] = 0.2
    assert draw(weights, numbers).tolist() == [333, 999, 999]


@pytest.mark.parametrize("vocab_size", [100, 5000])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
def test_top_p_of_flat_distributions(top_p: float, vocab_size: int) -> None:
    """Where thousands of tokens are needed, more candidates are looked at."""
    logits = random_logits(4, vocab_size, spread=0.1)
    scaled = logits - logits.amax(dim=1, keepdim=True)
    threshold = thresholds(scaled, *({"top_p": each} for each in (top_p, 1.0, top_p, top_p)))
    assert threshold[1] == -math.inf
    for row in (0, 2, 3):
        probabilities = scaled[row].double().softmax(dim=0).sort(descending=True).values
        needed = int((probabilities.cumsum(dim=0) < top_p).sum()) + 1
        kept = int((scaled[row] >= threshold[row]).sum())
        assert abs(kept - needed) <= 1


def test_equal_logits_share_their_fate() -> None:
    scaled = torch.tensor([[0.0, -1.0, -1.0, -1.0, -9.0]])
    for top_k, kept in ((1, 1), (2, 4), (4, 4)):
        threshold = thresholds(scaled, {"top_k": top_k})
        assert int((scaled >= threshold).sum()) == kept


def test_top_p_counts_what_top_k_left() -> None:
    """Of 0.4, 0.3, 0.2, 0.1 the two likeliest are 4/7 and 3/7, so that 0.5 needs one alone."""
    scaled = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log() - math.log(0.4)
    alone = thresholds(scaled, {"top_p": 0.5})
    after_top_k = thresholds(scaled, {"top_k": 2, "top_p": 0.5})
    assert int((scaled >= alone).sum()) == 2
    assert int((scaled >= after_top_k).sum()) == 1


def test_logprobs_are_of_the_raw_logits(native: bool) -> None:
    vocab_size = 200
    logits = random_logits(4, vocab_size)
    asked: dict[str, Any] = {"seed": 3, "temperature": 1.7, "top_k": 30, "frequency_penalty": 1.0}
    rows = [
        sequence([1], [2, 2], logprobs=3, logit_bias={"7": 20.0}, **asked),
        sequence([1], [2, 2], **asked),
        sequence([1], [2, 2], logprobs=0, **asked),
        sequence([1], temperature=0.0, logprobs=20),
    ]
    tokens = sample(logits, rows, native)
    assert tokens[1].logprob is None
    for row, num_top in ((0, 3), (2, 0), (3, 20)):
        token, report = tokens[row].token_id, tokens[row].logprob
        assert report is not None
        expected = logits[row].log_softmax(dim=0)
        assert report.token_id == token
        assert report.logprob == pytest.approx(float(expected[token]), abs=1e-5)
        assert report.rank == int((logits[row] > logits[row, token]).sum()) + 1
        top = report.top or []
        assert [each.token_id for each in top] == logits[row].topk(num_top).indices.tolist()
        values = expected.topk(num_top).values.tolist()
        assert [each.logprob for each in top] == pytest.approx(values, abs=1e-5)
    assert tokens[0].token_id == 7
    reporting = [rows[row] for row in (0, 2, 3)]
    assert sample(logits[[0, 2, 3]], reporting, native) == [tokens[row] for row in (0, 2, 3)]
    assert tokens[3].logprob is not None
    assert tokens[3].logprob.rank == 1


def test_what_cannot_be_chosen_has_a_logprob_that_json_knows(native: bool) -> None:
    logits = random_logits(1, 200)
    logits[0, 3:] = -torch.inf
    (token,) = sample(logits, [sequence([1], temperature=0.0, logprobs=5)], native)
    assert token.logprob is not None
    top = token.logprob.top or []
    assert [each.logprob for each in top[3:]] == [-9999.0, -9999.0]
    assert TokenLogprob.model_validate_json(token.logprob.model_dump_json()) == token.logprob


def test_asking_for_logprobs_changes_no_token(native: bool) -> None:
    logits = random_logits(20, 300)
    plain = [sequence([1], seed=row, top_p=0.8) for row in range(20)]
    asking = [sequence([1], seed=row, top_p=0.8, logprobs=5) for row in range(20)]
    before = logits.clone()
    assert token_ids(logits, plain, native) == token_ids(logits, asking, native)
    assert torch.equal(logits, before)
