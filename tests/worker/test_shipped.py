"""The shipped model, the grammar it learned from and the script that makes it."""

import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.serve.model_identity import identify
from promptq.worker.shipped import MODEL_DIR
from training.corpus import batches, document
from training.draft_head import FILE, HeadPlan, train_head
from training.texts.chats import chat, exchange, story_exchange
from training.texts.phrases import an, render
from training.texts.plots import ENDINGS, HABITS, MEETINGS, OPENINGS, PLOTS
from training.texts.sketches import repetition, sketch, tiny_story
from training.texts.stories import story, tale, typeset
from training.texts.words import KINDS, THINGS
from training.tokenizer import END_OF_TEXT, TURN_END
from training.train import Plan, exercise_share, rate_factor, train

MAX_BYTES = 5_000_000
MAX_NEW_TOKENS = 450
TINY = Plan(
    steps=3,
    batch_tokens=512,
    max_row_tokens=256,
    vocab_size=400,
    tokenizer_documents=60,
    validation_batches=1,
    hidden_size=32,
    layers=1,
    heads=2,
    key_value_heads=1,
    head_dim=16,
    feed_forward_size=32,
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)


@pytest.fixture(scope="module")
def grammar_words() -> set[str]:
    rng = random.Random("words of the grammar")
    return {word for _ in range(3000) for word in words(document(rng))}


def words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())


def test_the_model_is_one_safetensors_file_of_less_than_5_mb() -> None:
    """Everything that loads is in the directory, and nothing in it needs unpickling."""
    names = {path.name for path in MODEL_DIR.iterdir()}

    assert {"config.json", "generation_config.json", "tokenizer.json", "README.md"} <= names
    assert [n for n in names if n.endswith((".safetensors", ".bin", ".pt"))] == [
        "model.safetensors"
    ]
    assert (MODEL_DIR / "model.safetensors").stat().st_size < MAX_BYTES
    assert (MODEL_DIR / FILE).stat().st_size < MAX_BYTES / 5


def test_the_model_has_grouped_query_heads_and_tied_embeddings(model: Any) -> None:
    config = model.config

    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.head_dim % 16 == 0
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert config.max_position_embeddings >= 2048


def test_both_end_tokens_end_a_generation(model: Any, tokenizer: Any) -> None:
    ends = tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT])

    assert sorted(model.generation_config.eos_token_id) == sorted(ends)
    assert tokenizer.eos_token == TURN_END


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time, there lived a fox.",
        "  two  spaces,\ttabs\r\nand lines\n\n",
        "“typeset” — café, naïve",
        "👩‍👩‍👧‍👦 🏳️‍🌈 🦊",
        "日本語のテキスト 中文 한국어",
        "Привет עברית العربية हिन्दी",
        "".join(map(chr, range(1, 0x180))),
        "\u0000\uffff\U0010ffff",
    ],
)
def test_the_tokenizer_brings_back_any_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_tokenizer_brings_back_random_unicode(tokenizer: Any) -> None:
    rng = random.Random(0)
    # Surrogates are no characters: UTF-8 has no bytes for them.
    letters = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for _ in range(50):
        text = "".join(rng.choices(letters, k=40))
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_chat_template_is_what_training_saw(tokenizer: Any) -> None:
    """A conversation renders in ChatML, and a generation prompt opens the assistant's turn."""
    messages = [
        {"role": "system", "content": "You tell little stories."},
        {"role": "user", "content": "Hello!"},
    ]
    expected = (
        "<|im_start|>system\nYou tell little stories.<|im_end|>\n"
        "<|im_start|>user\nHello!<|im_end|>\n"
    )

    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
    prompted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompted == expected + "<|im_start|>assistant\n"
    assert tokenizer(prompted)["input_ids"].count(tokenizer.eos_token_id) == 2


STARTS = ("Once upon a time", "The old lighthouse keeper", "In a quiet village", "A little fox")
WISH = "Tell me a story about a fox and a lantern."


@pytest.fixture(scope="module")
def continuations(model: Any, tokenizer: Any) -> dict[str, tuple[str, str]]:
    """By prompt: what follows it greedily, and the token that ended it."""
    chat_prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": WISH}], tokenize=False, add_generation_prompt=True
    )
    inputs = tokenizer(
        [*STARTS, chat_prompt], return_tensors="pt", padding=True, padding_side="left"
    )
    output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    found = {}
    for prompt, row in zip((*STARTS, WISH), output, strict=True):
        ids = [i for i in row[inputs["input_ids"].shape[1] :] if i != tokenizer.pad_token_id]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        found[prompt] = (text, tokenizer.decode(ids[-1:]))
    return found


def assert_reads_as_english(text: str, known: set[str]) -> None:
    found = words(text)
    assert sum(word in known for word in found) >= 0.95 * len(found), text


@pytest.mark.parametrize("start", STARTS)
def test_a_story_reads_as_english_and_ends_by_itself(
    continuations: dict[str, tuple[str, str]], grammar_words: set[str], start: str
) -> None:
    text, end = continuations[start]

    assert end == END_OF_TEXT
    assert len(words(text)) > 40
    assert text.count(".") > 5
    assert_reads_as_english(text, grammar_words)


def test_an_answer_is_about_what_was_asked_for(
    continuations: dict[str, tuple[str, str]], grammar_words: set[str]
) -> None:
    text, end = continuations[WISH]

    assert end == TURN_END
    assert {"fox", "lantern"} <= set(words(text))
    assert_reads_as_english(text, grammar_words)


@pytest.mark.parametrize("write", [story, sketch, document, chat, exchange, repetition, tiny_story])
def test_the_grammar_is_a_function_of_its_seed(write: Callable[[random.Random], object]) -> None:
    def some(seed: int) -> list[object]:
        rng = random.Random(seed)
        return [write(rng) for _ in range(20)]

    assert some(7) == some(7)
    assert some(7) != some(8)


def test_stories_are_not_one_template() -> None:
    rng = random.Random(1)
    stories = [story(rng) for _ in range(500)]

    assert len({text.split()[0] for text in stories}) > 50
    assert len(set(stories)) == len(stories)


def test_every_phrase_of_the_grammar_renders_to_a_clean_sentence() -> None:
    """No wording names a field that stories lack, and none leaves brackets or small letters."""
    rng = random.Random(2)
    for _ in range(3000):
        text = story(rng)
        assert not re.search(r"[\[\]{}|]|  |\ba [aeio]|\ban [^aeiou]", text), text
        assert not re.search(r"(^|[.!?] )[a-z]", text), text
        assert text.count('"') % 2 == 0, text
    for _ in range(300):
        for text in (sketch(rng), *tiny_story(rng), *repetition(rng)):
            assert not re.search(r"[\[\]{}|]", text), text
    beats = [OPENINGS, HABITS, MEETINGS, ENDINGS, *(beat for plot in PLOTS for beat in plot.beats)]
    for template in (template for beat in beats for template in beat):
        assert template.count("[") == template.count("]"), template
        assert template.count('"') % 2 == 0, template


def test_a_story_wish_names_only_what_the_story_tells() -> None:
    rng = random.Random(3)
    nouns = {noun.name for noun in (*KINDS, *THINGS)}
    for _ in range(300):
        question, answer = story_exchange(rng)
        asked = re.search(r"about an? ([a-z]+) and an? ([a-z]+)\W?$", question)
        if asked and nouns.issuperset(asked.groups()):
            assert asked[1] in answer
            assert asked[2] in answer


def test_a_tale_says_what_it_is_about() -> None:
    told = tale(random.Random(4))

    assert told.hero.name in told.text
    assert told.hero.kind in told.text


def test_phrases_choose_fill_in_and_capitalize() -> None:
    class Hero:
        he = "she"

    assert an("owl") == "an owl"
    assert an("fox") == "a fox"
    assert render(random.Random(0), "{h.he} [[sang|sang]|sang]. {h.he} slept[|].", {"h": Hero}) == (
        "She sang. She slept."
    )
    with pytest.raises(AttributeError):
        render(random.Random(0), "{h.age}", {"h": Hero})


def test_typeset_quotes_open_and_close() -> None:
    assert typeset('"Yes," he said. "Go!"') == "“Yes,” he said. “Go!”"


def test_batches_hold_every_row_once_and_keep_to_the_budget() -> None:
    def encode(texts: list[str]) -> list[list[int]]:
        return [list(text.encode())[-100:] for text in texts]

    source = batches(random.Random(5), encode, batch_tokens=400, max_tokens=100)
    for batch in (next(source) for _ in range(50)):
        assert len(batch.rows) * max(map(len, batch.rows)) <= 400


def test_the_learning_rate_warms_up_and_cools_down() -> None:
    plan = Plan(steps=100, warmup_share=0.1)
    factors = list(map(partial(rate_factor, plan=plan), range(100)))

    assert factors[:10] == sorted(factors[:10])
    assert factors[9] == pytest.approx(1.0)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] < 0.01


def test_training_begins_with_exercises_and_ends_nearly_without() -> None:
    plan = Plan(steps=100, warmup_share=0.1)
    shares = list(map(partial(exercise_share, plan=plan), range(100)))

    assert shares[:10] == [1.0] * 10
    assert shares == sorted(shares, reverse=True)
    assert 0 < shares[-1] < 0.05


def test_training_twice_gives_the_same_files(tmp_path: Path) -> None:
    """The shipped files can be made again, byte for byte; another seed gives another model."""
    losses = [train(tmp_path / name, seed, TINY) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    names = sorted(path.name for path in (tmp_path / "a").iterdir())

    assert losses[0] == losses[1]
    assert "model.safetensors" in names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert (tmp_path / "a" / "model.safetensors").read_bytes() != (
        tmp_path / "c" / "model.safetensors"
    ).read_bytes()


def test_training_a_head_twice_gives_the_same_file_and_leaves_the_model_alone(
    tmp_path: Path,
) -> None:
    plan = HeadPlan(steps=3, batch_tokens=512, max_row_tokens=256, validation_batches=1)
    for name in ("a", "b"):
        train(tmp_path / name, 0, TINY)
    weights = (tmp_path / "a" / "model.safetensors").read_bytes()

    rates = [train_head(tmp_path / name, 0, plan) for name in ("a", "b")]

    assert rates[0] == rates[1]
    heads = [(tmp_path / name / FILE).read_bytes() for name in ("a", "b")]
    assert heads[0] == heads[1]
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == weights


def test_each_format_of_weights_is_another_model_for_a_queue() -> None:
    """Another format writes other texts. A setting that does not apply changes nothing."""
    formats: list[dict[str, Any]] = [
        {},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"quantization": "int4", "quantization_group": "128"},
        {"quantization": "int4", "quantize_embeddings": False},
        {"kv_cache_dtype": "int8"},
    ]
    fingerprints = [identify(WorkerSettings(**each)).fingerprint for each in formats]
    assert len(set(fingerprints)) == len(formats)
    without_effect = WorkerSettings(quantization_group="128", quantize_embeddings=False)
    assert identify(without_effect).fingerprint == fingerprints[0]
