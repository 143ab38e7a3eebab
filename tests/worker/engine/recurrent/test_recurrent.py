"""Recurrent layers: each sequence has its own state, however steps cut and mix the sequences."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from promptq.shared.errors import ConfigurationError, UnsupportedModelError
from promptq.shared.protocol.request import NEUTRAL, FinishReason, SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.attention.torch_paged import TorchPaged
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence
from promptq.worker.engine.load_check.comparison import off_by
from promptq.worker.engine.load_check.formula import check_model
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions
from promptq.worker.engine.recurrent.mixer import Mixer
from promptq.worker.engine.recurrent.recognition import mixers_of
from promptq.worker.engine.recurrent.rows import LONGEST_PIECE, Pieces
from promptq.worker.engine.recurrent.state_pool import StatePool, pool_bytes
from promptq.worker.engine.runner.load_runner import load_runner
from promptq.worker.engine.runner.model_runner import ModelRunner
from promptq.worker.engine.runner.trial_steps import most_padded_step
from tests.worker.engine.core.test_recovery import serve
from tests.worker.engine.tiny_models import (
    RECURRENT_FAMILIES,
    VOCAB_SIZE,
    generate,
    make_model,
    save_model,
)

CPU = torch.device("cpu")
ONE_OF_EACH_KIND = ["qwen3_5_text", "kimi_linear", "granitemoehybrid", "lfm2"]
MAMBA_ALONE = {  # without attention
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 16,
    "n_groups": 2,
    "expand": 2,
}
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: save_model(tmp_path_factory.mktemp(name), name, 5))


def load(directory: Path, **options: Any) -> ModelRunner:
    settings = {"max_num_seqs": 4, "kv_cache_memory": 2_000_000, "block_size": 4} | options
    settings.setdefault("dtype", "float32")
    return load_runner(str(directory), LoadOptions(device="cpu", **settings))


def sequences_of(lengths: list[int]) -> list[Sequence]:
    sequences = []
    for slot, length in enumerate(lengths):
        sequence = Sequence.of(EngineRequest(slot, [0] * length, NEUTRAL, seed=0, max_tokens=1))
        sequence.slot = slot
        sequences.append(sequence)
    return sequences


@torch.inference_mode()
def mixed(
    mixer: Mixer, inputs: list[torch.Tensor], rng: random.Random, *, fails: float = 0.0
) -> list[torch.Tensor]:
    """The outputs for the inputs [length, size] of some sequences, in random steps. A step that
    fails has written its states, and is computed again."""
    pool = StatePool([mixer], len(inputs), inputs[0].device)
    for tensor in pool.tensors[0]:
        tensor[1:] = float("nan")  # left by former owners
    sequences = sequences_of([len(each) for each in inputs])
    outputs: list[list[torch.Tensor]] = [[] for _ in inputs]
    places = [0] * len(inputs)
    while any(place < len(each) for place, each in zip(places, inputs, strict=True)):
        items = []
        for index, sequence in enumerate(sequences):
            left = len(inputs[index]) - places[index]
            if left and rng.random() < 0.8:
                count = rng.choice([1, min(left, rng.randint(1, 9)), left])
                items.append(ScheduledSequence(sequence, places[index], count, samples=False))
        items.sort(key=lambda item: item.num_rows)
        if not items:
            continue
        hidden = torch.cat(
            [inputs[it.sequence.sequence_id][it.start : it.start + it.num_rows] for it in items]
        )
        rows = pool.begin(items)
        output = mixer.mix(hidden, rows, pool.tensors[0])
        pool.finish(items)
        if rng.random() < fails:
            continue
        for item, first in zip(items, rows.starts, strict=False):
            index = item.sequence.sequence_id
            outputs[index].append(output[first : first + item.num_rows])
            places[index] += item.num_rows
    return [torch.cat(each) for each in outputs]


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
@torch.inference_mode()
def test_any_cut_gives_the_librarys_output(family: str, seed: int) -> None:
    """Pieces are shorter than the longest sequences, and steps fail."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    mixer = mixers_of(make_model(family, seed))[-1]
    inputs = [torch.randn(length, 32) for length in (1, 2, 150, 64, 65, 7)]
    expected = [mixer.module(each.unsqueeze(0))[0] for each in inputs]
    outputs = mixed(mixer, inputs, rng, fails=0.3)
    # A single row may be off by more than most rows are.
    off = torch.cat([off_by(*pair).flatten() for pair in zip(outputs, expected, strict=True)])
    assert (float(off.median()) < 1e-5, float(off.max()) < 1e-3) == (True, True)


def num_places(lengths: list[int], longest: int = LONGEST_PIECE) -> int:
    pieces = Pieces(sorted(lengths), longest, CPU)
    return len(pieces.cut(torch.zeros(sum(lengths), 1))) * pieces.size


def test_no_step_has_more_places_in_pieces_than_the_one_that_is_measured(seed: int) -> None:
    """Short chunks beside a long one would be filled up to its length."""
    rng = random.Random(seed)
    for _ in range(200):
        num_tokens, num_seqs = rng.randint(300, 3000), rng.choice([1, 4, 64, 500])
        measured = num_places([rows for _, rows in most_padded_step(num_tokens, num_seqs, 5000)])
        short = rng.choice([2, 5, 33, 65, 100])
        lengths = [rng.randint(2, short) for _ in range(num_seqs - 1)]
        while sum(lengths) > num_tokens - 2:
            lengths.pop()
        lengths.append(num_tokens - sum(lengths))
        assert num_places(lengths) <= 2 * num_tokens
        assert num_places(lengths) <= 1.04 * measured + 128, lengths


def test_a_state_of_other_tokens_is_not_used() -> None:
    mixer = mixers_of(make_model("lfm2"))[0]
    pool = StatePool([mixer], 1, CPU)
    [sequence] = sequences_of([9])
    pool.begin([ScheduledSequence(sequence, 0, 5, samples=False)])
    with pytest.raises(RuntimeError, match="goes on after 5 tokens"):  # the step did not end
        pool.begin([ScheduledSequence(sequence, 5, 1, samples=False)])
    for start, count in ((0, 4), (4, 1), (0, 2)):  # the last one is another sequence's
        shares = [ScheduledSequence(sequence, start, count, samples=False)]
        pool.begin(shares)
        pool.finish(shares)
    with pytest.raises(RuntimeError, match="goes on after 5 tokens"):
        pool.begin([ScheduledSequence(sequence, 5, 1, samples=False)])


@pytest.mark.matrix(2)
@pytest.mark.parametrize("native", [True, False], ids=["native", "modules"])
@pytest.mark.parametrize("family", ONE_OF_EACH_KIND)
def test_a_failed_step_is_computed_again_from_the_states_before_it(
    family: str,
    native: bool,
    directory_of: Callable[[str], Path],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps fail after the forward, at random if they have several sequences. Sequence 3 always
    fails once it has four tokens."""
    rng, guilty = random.Random(seed), 3
    runner = load(directory_of(family), native=native)
    launch, num_failed = runner.launch, 0

    def failing(batch: Batch, after: Any = None) -> Any:
        nonlocal num_failed
        launched = launch(batch, after)
        of_guilty = [it for it in batch.scheduled if it.sequence.sequence_id == guilty]
        is_guilty = any(it.sequence.num_output_tokens == 4 for it in of_guilty)
        if is_guilty or (len(batch.scheduled) > 1 and rng.random() < 0.3):
            num_failed += 1
            raise ValueError("bad luck")
        return launched

    monkeypatch.setattr(runner, "launch", failing)
    prefix = [rng.randrange(3, VOCAB_SIZE) for _ in range(9)]
    prompts = [prefix + [rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (1, 30, 11, 2, 9)]
    model = make_model(family, 5)
    expected = {n: generate(model, prompt, 12) for n, prompt in enumerate(prompts)}
    expected[guilty] = expected[guilty][:4]
    requests = [
        EngineRequest(n, prompt, GREEDY, seed=0, max_tokens=12) for n, prompt in enumerate(prompts)
    ]
    engine = LLMEngine(runner, max_num_seqs=4, max_num_batched_tokens=16, prefill_chunk=7)
    tokens, last = serve(engine, requests)
    assert tokens == expected
    assert num_failed > 3
    assert engine.stats.recomputed_tokens == 0
    assert engine.stats.cached_tokens > 0
    assert last[guilty].finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("native", [True, False], ids=["native", "modules"])
def test_what_former_owners_left_in_a_slot_reaches_nobody(
    native: bool, directory_of: Callable[[str], Path]
) -> None:
    """Sequences end, are cancelled, and fail; the slot's next owner begins with zeros."""
    runner: Any = load(directory_of("qwen3_5_text"), max_num_seqs=1, native=native)
    engine = LLMEngine(runner, max_num_seqs=1, max_num_batched_tokens=16)
    prompt = [7, 8, 9, 10, 11]
    wanted = generate(make_model("qwen3_5_text", 5), prompt, 6)
    for number in range(3):
        engine.add(EngineRequest(100 + number, [5] * 20, GREEDY, seed=0, max_tokens=3))
        engine.step()
        if number:
            engine.abort(100 + number)
        else:
            while engine.has_work:
                engine.step()
        for tensors in runner.states.tensors:
            for tensor in tensors:
                tensor[1:] = float("nan")
        tokens, _ = serve(engine, [EngineRequest(number, prompt, GREEDY, seed=0, max_tokens=6)])
        assert tokens[number] == wanted


def test_states_count_as_memory(directory_of: Callable[[str], Path]) -> None:
    """For each slot, before the KV cache gets blocks; too little is refused in one sentence."""
    directory = directory_of("qwen3_5_text")
    runner: Any = load(directory, max_num_seqs=3, kv_cache_memory=300_000)
    layout = runner.kv_layout
    held = sum(tensor.nbytes for tensors in runner.states.tensors for tensor in tensors)
    assert held == layout.state_bytes == pool_bytes(mixers_of(make_model("qwen3_5_text")), 3)
    block_bytes = layout.block_size * layout.bytes_per_token
    assert layout.num_blocks == (300_000 - held) // block_bytes
    engine = LLMEngine(runner, max_num_seqs=3, max_num_batched_tokens=16)
    assert engine.limits.state_bytes == held

    few = f"--max-num-seqs: .* take {held} bytes .* at least {2 * block_bytes} .* {held + 100} for"
    with pytest.raises(ConfigurationError, match=few):
        load(directory, max_num_seqs=3, kv_cache_memory=held + 100)
    with pytest.raises(ConfigurationError, match="4 is more than the 3 sequences"):
        LLMEngine(runner, max_num_seqs=4, max_num_batched_tokens=16)


def test_the_librarys_modules_draft_nothing(directory_of: Callable[[str], Path]) -> None:
    """A rejected draft could not be taken back out of a state."""
    runner = load(directory_of("lfm2"), native=False)
    engine = LLMEngine(
        runner,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        speculative_tokens=7,
        async_scheduling=True,
    )
    drafting = SamplingParams(temperature=0.0, speculative_tokens=5, logit_bias={"5": 100.0})
    prompt = [5, 6] * 20
    requests = [EngineRequest(n, prompt, drafting, seed=0, max_tokens=20) for n in range(3)]
    tokens, _ = serve(engine, requests)
    assert tokens == {n: [5] * 20 for n in range(3)}
    assert engine.stats.drafted_tokens == 0
    assert not runner.is_row_invariant


@pytest.mark.matrix(1)
@pytest.mark.parametrize("family", [*ONE_OF_EACH_KIND, "falcon_h1", "nemotron_h"])
@pytest.mark.usefixtures("costless")
def test_a_resume_in_bf16_has_the_same_bits(
    family: str, directory_of: Callable[[str], Path], seed: int
) -> None:
    """Tokens and log-probabilities of an attempt that continues from tokens in chunks, from a kept
    state, after preemptions, and with drafts are those of a run alone without any."""
    rng = random.Random(seed)
    runner = load(directory_of(family), dtype="bfloat16")
    assert runner.abilities.exact_resume
    prefix = [rng.randrange(3, VOCAB_SIZE) for _ in range(21)]
    prompts = [prefix + [rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (3, 14, 2, 9)]
    few = dict.fromkeys(("11", "23", "42"), 100.0)  # so some drafts are right
    params = [
        SamplingParams(temperature=0.0, logprobs=0, logit_bias=few),
        SamplingParams(temperature=1.3, top_p=0.9, logprobs=0, logit_bias=few),
    ]

    def served(num_done: int = 0, **options: Any) -> tuple[list[Any], LLMEngine]:
        """The tokens and log-probabilities after the first `num_done` of each, and the engine."""
        engine = LLMEngine(runner, **{"max_num_seqs": 4, "max_num_batched_tokens": 64} | options)
        results: list[Any] = [[] for _ in prompts]
        waiting = [
            EngineRequest(
                *(n, prompt, params[n % 2]),
                seed=n,
                max_tokens=50,
                output_token_ids=[token for token, _ in alone[n][:num_done]] if num_done else [],
                priority=-n,
            )
            for n, prompt in enumerate(prompts)
        ]
        while waiting or engine.has_work:
            if waiting:
                engine.add(waiting.pop(0))
            for output in engine.step().outputs:
                logprobs = [each.logprob for each in output.logprobs or ()]
                results[output.sequence_id] += zip(output.token_ids, logprobs, strict=True)
            engine.check_integrity()
        return results, engine

    alone: list[Any] = []
    alone, _ = served(max_num_seqs=1)
    assert served(prefill_chunk=5)[0] == alone
    for num_done in (1, 8, 17):
        rest = [made[num_done:] for made in alone]
        resumed, engine = served(num_done, prefill_chunk=6)
        assert resumed == rest
        assert engine.stats.cached_tokens > 0
    preempted, engine = served(max_num_seqs=2)
    assert (preempted, engine.stats.num_preemptions > 0) == (alone, True)
    drafted, engine = served(speculative_tokens=7)
    assert drafted == alone
    assert engine.stats.drafted_tokens > engine.stats.accepted_tokens > 0


@pytest.mark.matrix(2)
@pytest.mark.parametrize("together", [False, True], ids=["in-turn", "together"])
@pytest.mark.parametrize("family", ONE_OF_EACH_KIND)
def test_a_prefix_is_computed_until_its_state_is_kept(
    family: str, together: bool, directory_of: Callable[[str], Path]
) -> None:
    """Together, the first one keeps its state for those that wait. In turn, the second one finds
    the first one's blocks, and keeps its state where they end. Half a slot has a kept state."""
    runner: Any = load(directory_of(family))
    engine = LLMEngine(runner, max_num_seqs=4, max_num_batched_tokens=64)
    prefixes = [[3 + (7 * n + 5 * place) % 90 for place in range(22)] for n in range(3)]
    model, first_id = make_model(family, 5), 0

    def cached(prefix: list[int], count: int) -> list[int]:
        """Serve prompts with this prefix. Returns how many tokens of each were cached."""
        nonlocal first_id
        prompts = {first_id + n: [*prefix, 90 - n, *range(5, 5 + n)] for n in range(count)}
        first_id += count
        timings: dict[int, int] = {}
        groups = [prompts] if together else [{n: prompt} for n, prompt in prompts.items()]
        for group in groups:
            requests = [
                EngineRequest(n, it, GREEDY, seed=0, max_tokens=5) for n, it in group.items()
            ]
            tokens, last = serve(engine, requests)
            assert tokens == {n: generate(model, it, 5) for n, it in group.items()}
            for n, output in last.items():
                assert output.timing is not None
                timings[n] = output.timing.cached_tokens
        return [timings[n] for n in prompts]

    computed = [0] if together else [0, 0]
    assert cached(prefixes[0], 4) == [*computed, *[20] * (4 - len(computed))]
    assert cached(prefixes[0], 1) == [20]
    assert cached(prefixes[1], 3)[-1] == 20
    assert cached(prefixes[0], 1) == [20], "there are two places"
    assert cached(prefixes[2], 3)[-1] == 20
    assert cached(prefixes[1], 1) == [0], "its state was used least recently"
    assert cached(prefixes[1], 1) == [20]
    for tensors in runner.states.tensors:
        for tensor in tensors:
            tensor[1:9] = float("nan")  # of the slots
    assert cached(prefixes[1], 1) == [20]


def test_tenants_do_not_find_each_others_states(directory_of: Callable[[str], Path]) -> None:
    engine = LLMEngine(load(directory_of("lfm2")), max_num_seqs=4, max_num_batched_tokens=64)
    prompt = [3 + 5 * place % 90 for place in range(22)]
    cached = []
    for number, tenant in enumerate(["a", "a", "a", "b", "b", "b"]):
        request = EngineRequest(number, prompt, GREEDY, seed=0, max_tokens=2, tenant=tenant)
        _, last = serve(engine, [request])
        timing = last[number].timing
        assert timing is not None
        cached.append(timing.cached_tokens)
    assert cached == [0, 0, 20, 0, 0, 20]


def assert_right_tokens(runner: ModelRunner, model: Any) -> None:
    """Asserts that prompts of several lengths, in chunks, get the tokens of the library's model."""
    engine = LLMEngine(runner, max_num_seqs=4, max_num_batched_tokens=16, prefill_chunk=7)
    prompts = [[3 + (7 * n + 5 * place) % 90 for place in range(1 + 5 * n)] for n in range(6)]
    requests = [
        EngineRequest(n, prompt, GREEDY, seed=0, max_tokens=9) for n, prompt in enumerate(prompts)
    ]
    tokens, _ = serve(engine, requests)
    assert tokens == {n: generate(model, prompt, 9) for n, prompt in enumerate(prompts)}


@pytest.mark.parametrize("native", [True, False], ids=["native", "modules"])
def test_a_model_without_attention_is_served(native: bool, tmp_path: Path) -> None:
    """The model needs no positions and no KV cache, only memory for its states."""
    directory = save_model(tmp_path, "mamba2", 5, **MAMBA_ALONE)
    model = make_model("mamba2", 5, **MAMBA_ALONE)
    needed = pool_bytes(mixers_of(model), 4)
    runner = load(directory, max_model_len=64, native=native, kv_cache_memory=needed)
    assert (runner.why_no_own_code == "") == native
    assert runner.kv_layout.bytes_per_token == 0
    assert_right_tokens(runner, model)
    with pytest.raises(ConfigurationError, match=f"{needed} bytes .* are {needed - 1} for both"):
        load(directory, native=native, kv_cache_memory=needed - 1)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("falcon_h1", {"mamba_rms_norm": False}),
        ("falcon_h1", {"mamba_norm_before_gate": False}),
        ("falcon_h1", {"attention_in_multiplier": 1.0, "attention_bias": True}),
        ("falcon_h1", {"ssm_in_multiplier": 1.0, "mamba_proj_bias": True}),
    ],
)
def test_variants_of_a_family(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    runner = load(save_model(tmp_path, family, 5, **overrides))
    assert runner.why_no_own_code == ""
    assert_right_tokens(runner, make_model(family, 5, **overrides))


def check(model: Any) -> str:
    """Why the model is refused; empty if it is served."""
    try:
        check_model(LoadedModel("tiny", model, frozenset()), [TorchPaged()], 128)
    except UnsupportedModelError as error:
        return str(error)
    return ""


def test_another_formula_behind_the_same_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_rule = modeling_qwen3_5.torch_chunk_gated_delta_rule

    def slower(*tensors: torch.Tensor, g: torch.Tensor, **others: Any) -> Any:
        return chunk_rule(*tensors, g=0.9 * g, **others)

    model = make_model("qwen3_5_text")
    assert check(model) == ""
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", slower)
    assert "do not get the same logits as alone" in check(make_model("qwen3_5_text"))


def test_the_check_leaves_the_librarys_modules_as_they_were() -> None:
    model = make_model("falcon_h1")
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.inference_mode():
        before = model(input_ids=ids, use_cache=False).logits
        assert check(model) == ""
        model.set_attn_implementation("eager")
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


@pytest.mark.parametrize("family", ONE_OF_EACH_KIND)
def test_bf16_is_close_to_fp32(family: str, directory_of: Callable[[str], Path]) -> None:
    """The check at load is made in fp32, and states are rounded as little as the library's."""
    runner = load_runner(
        str(directory_of(family)),
        LoadOptions(device="cpu", dtype="bfloat16", max_num_seqs=4, kv_cache_memory=2_000_000),
    )
    engine = LLMEngine(runner, max_num_seqs=4, max_num_batched_tokens=16, prefill_chunk=7)
    prompts = [[3 + (7 * n + 5 * place) % 90 for place in range(10 + n)] for n in range(8)]
    requests = [
        EngineRequest(n, prompt, GREEDY, seed=0, max_tokens=4) for n, prompt in enumerate(prompts)
    ]
    tokens, _ = serve(engine, requests)
    exact = make_model(family, 5)
    library = make_model(family, 5).to(torch.bfloat16)
    wanted = [generate(exact, prompt, 4) for prompt in prompts]
    rounded = [generate(library, prompt, 4) for prompt in prompts]

    def agreement(outputs: list[list[int]]) -> int:
        pairs = zip(outputs, wanted, strict=True)
        return sum(a == b for output, right in pairs for a, b in zip(output, right, strict=True))

    assert agreement([tokens[n] for n in range(8)]) >= agreement(rounded) - 4
