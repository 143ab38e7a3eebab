"""Text comes whole: no half characters, stop strings cut exactly, any attempt goes on alike."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from promptq.shared.protocol.request import Request
from promptq.worker.shipped import MODEL_DIR
from promptq.worker.text.detokenizer import REPLACEMENT, Decode, TextStream
from promptq.worker.text.stop_strings import StopStrings
from promptq.worker.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from tests.worker.text.families import byte_fallback, sentence_piece

decode = ByteTokenizer().decode

texts = st.text(st.sampled_from("ab é→🦊👩‍🚀漢字\n"), max_size=30)
stops = st.lists(st.text(st.sampled_from("ab é🦊"), min_size=1, max_size=4), max_size=3)


def run(stream: TextStream, tokens: Sequence[int]) -> list[str]:
    pieces = []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces
    return [*pieces, stream.flush()]


@given(texts)
def test_pieces_hold_whole_characters_and_make_up_the_text(text: str) -> None:
    pieces = run(TextStream(decode), text.encode())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.binary(max_size=40), st.binary(max_size=8))
def test_pieces_make_up_the_decoded_tokens_whatever_the_bytes(tokens: bytes, prompt: bytes) -> None:
    pieces = run(TextStream(decode, list(prompt)), tokens)
    assert "".join(pieces) == tokens.decode("utf-8", "replace")


def test_a_dangling_half_character_is_flushed_as_replacement() -> None:
    half = "🦊".encode()[:3]
    stream = TextStream(decode)
    assert [stream.push(token) for token in half] == ["", "", ""]
    assert stream.flush() == "\ufffd"


@given(texts, stops)
def test_the_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    stream = TextStream(decode, stop=stop)
    got = "".join(run(stream, text.encode()))
    # The first to be complete ends the request, so the shortest prefix that holds one decides.
    ends = [text[:n] for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stop)]
    if ends:
        assert got == ends[0][: min(at for s in stop if (at := ends[0].find(s)) >= 0)]
        assert stream.stopped
        assert stream.stop_string is not None
        assert got + stream.stop_string == ends[0]
    else:
        assert got == text
        assert not stream.stopped
        assert stream.stop_string is None


def test_only_what_could_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(decode, stop=["END"])
    assert [stream.push(token) for token in b"a EN"] == ["a", " ", "", ""]
    assert stream.push(ord("x")) == "ENx"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    stream = TextStream(decode, stop=["b"], min_tokens=3)
    assert run(stream, b"abab")[:3] == ["a", "b", "a"]
    assert stream.stopped


@example("xxopy", "st", ["stop"], 5)
@example("stopx", "", ["stop"], 4)
@given(
    st.text("abc", max_size=12),
    st.text("abc", max_size=3),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 12),
)
def test_the_first_stop_string_that_ends_at_min_tokens_or_later_stops(
    text: str, before: str, stop: list[str], min_tokens: int
) -> None:
    whole = before + text
    begins = [
        min(end - len(string) for string in stop if whole[:end].endswith(string))
        for end in range(max(len(before) + 1, min_tokens), len(whole) + 1)
        if whole[:end].endswith(tuple(stop))
    ]
    stream = TextStream(decode, stop=stop, min_tokens=min_tokens)
    begin = stream.begin(before.encode())
    pushed = "".join(run(stream, text.encode()))
    end = max(len(before), begins[0]) if begins else len(whole)
    assert begin + pushed == whole[:end]


@given(texts, stops, st.integers(0, 60), st.integers(0, 5))
def test_an_attempt_goes_on_where_an_earlier_one_stopped(
    text: str, stop: list[str], at: int, min_tokens: int
) -> None:
    tokens = text.encode()
    undisturbed = "".join(run(TextStream(decode, stop=stop, min_tokens=min_tokens), tokens))
    first = TextStream(decode, stop=stop, min_tokens=min_tokens)
    emitted = "".join(first.push(token) for token in tokens[:at])
    second = TextStream(decode, stop=stop, min_tokens=min_tokens)
    assert second.replay(tokens[:at]) == emitted
    rest = "" if second.stopped else "".join(run(second, tokens[at:]))
    assert emitted + rest == undisturbed


@example("abcd", ["bc"], 2)
@example("abcd", ["abc", "d"], 2)
@example("ab-d", ["abc"], 2)
@example("aaaa", ["aa"], 2)
@given(texts, stops, st.integers(0, 60))
def test_a_stop_string_may_begin_in_what_is_given_but_not_end_there(
    text: str, stop: list[str], at: int
) -> None:
    tokens = text.encode()
    stream = TextStream(decode, stop=stop)
    begin = stream.begin(tokens[:at])
    assert not stream.stopped
    got = begin + "".join(run(stream, tokens[at:]))
    lengths = range(len(begin) + 1, len(text) + 1)
    ends = [text[:n] for n in lengths if any(text[:n].endswith(s) for s in stop)]
    if ends:
        found = min(len(ends[0]) - len(s) for s in stop if ends[0].endswith(s))
        assert got == ends[0][: max(len(begin), found)]
        assert stream.stopped
    else:
        assert got == text


def test_nothing_of_a_stop_string_that_began_in_what_is_given_comes_out() -> None:
    """However long the parts are in which the rest of it comes."""
    stop = StopStrings(["abcde"])
    stop.begin_after("xa")
    assert [stop.release(part, may_end=True) for part in ("bcd", "efg")] == ["", ""]
    assert stop.found


def test_a_text_is_tokenised_as_it_stands_in_a_line() -> None:
    """Some tokenizers put a space in front of a text, which would part a word."""
    for tokenizer in (
        HuggingFaceTokenizer(sentence_piece()),
        HuggingFaceTokenizer.load(str(MODEL_DIR)),
    ):
        before = tokenizer.encode_text("a b")
        for text in ("cat", " cat", "\ncat", "\n\n a", "1", "  "):
            joined = tokenizer.decode([*before, *tokenizer.encode_output(text)])
            assert joined == f"{tokenizer.decode(before)}{text}"


@pytest.mark.parametrize("prompt", ["a\ufffd", "a" + "\ufffd" * 5, "a" + "\ufffd" * 300, "\ufffd"])
@pytest.mark.parametrize("num_given", [0, 1, 3])
def test_an_output_behind_a_replacement_character_keeps_its_first_space(
    prompt: str, num_given: int
) -> None:
    tokenizer = HuggingFaceTokenizer(sentence_piece(adds_bos=True))
    before = tokenizer.encode_prompt(Request(prompt=prompt))
    output = tokenizer.encode_text("cat\ufffd a 漢")
    stream = TextStream(tokenizer.decode, before)
    pieces = [stream.begin(output[:num_given])]
    pieces += [stream.push(token_id) for token_id in output[num_given:]]
    assert "".join(pieces) + stream.flush() == " cat\ufffd a 漢"
    assert tokenizer.decode([*before, *output]) == prompt + " cat\ufffd a 漢"


@pytest.mark.parametrize(("has_bos", "num_times"), [(False, 1), (True, 1), (False, 800)])
def test_an_output_behind_parts_of_characters_alone_keeps_its_first_space(
    has_bos: bool, num_times: int
) -> None:
    tokenizer = HuggingFaceTokenizer(sentence_piece(adds_bos=True))
    bos = tokenizer.encode_prompt(Request(prompt="a"))[:1]
    before = [*bos * has_bos, *tokenizer.encode_text("漢")[-2:] * num_times]
    assert set(tokenizer.decode(before)) == {REPLACEMENT}
    output = tokenizer.encode_text("cat 漢")
    assert "".join(run(TextStream(tokenizer.decode, before), output)) == " cat 漢"
    assert "".join(run(TextStream(tokenizer.decode, bos), output)) == "cat 漢"


def test_half_a_character_before_an_output_does_not_spoil_it() -> None:
    """Be it that of a prompt that was sent as token ids."""
    tokenizer = HuggingFaceTokenizer(sentence_piece())
    before = [*tokenizer.encode_text("a"), *tokenizer.encode_text("漢")[1:3]]
    output = tokenizer.encode_text("漢 cat")
    assert "".join(run(TextStream(tokenizer.decode, before), output)) == " 漢 cat"


# --- bytes that are no characters, and tokens without a text, for as long as it pleases the model


@dataclass(frozen=True)
class Kind:
    """Of tokenizer."""

    decode: Decode
    token_of: list[int]
    """Of each byte."""
    letter: int
    """A token that no run of bytes goes on with."""
    silent: int
    """One without a text."""


@pytest.fixture(scope="module", params=["bytes", "byte level", "byte fallback"])
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "bytes":
        return Kind(decode, [*range(256)], ord("a"), 256)
    if request.param == "byte fallback":
        tokenizer = byte_fallback()
        letter = tokenizer.convert_tokens_to_ids("a")
        return Kind(HuggingFaceTokenizer(tokenizer).decode, [*range(3, 259)], letter, 2)
    shipped = HuggingFaceTokenizer.load(str(MODEL_DIR))
    vocabulary = json.loads(shipped.as_json() or "")["model"]["vocab"]
    # Bytes that cannot be seen are named by characters from U+0100 on.
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = count(256)
    token_of = [vocabulary[chr(byte if byte in seen else next(others))] for byte in range(256)]
    return Kind(shipped.decode, token_of, vocabulary["a"], 2)


def certain_pieces(decode: Decode, tokens: list[int]) -> list[str]:
    """Returns the text that each token makes certain, by decoding all tokens so far each time."""
    pieces, done = [], ""
    for num_tokens in range(1, len(tokens) + 1):
        whole = decode(tokens[:num_tokens])
        is_certain = not whole.endswith(REPLACEMENT)
        pieces.append(whole[len(done) :] if is_certain else "")
        done = whole if is_certain else done
    return [*pieces, decode(tokens)[len(done) :]]


@pytest.mark.parametrize("seed", range(20))
def test_wrong_bytes_hold_back_no_more_than_they_must(kind: Kind, seed: int) -> None:
    rng = random.Random(seed)
    tokens: list[int] = []
    for _ in range(8):
        # A run of bytes that begins within a character is wrong, whatever follows.
        anything = [0x80, *rng.choices(b"\n\x80\x9f\xf0\xe6", k=rng.choice([2, 60]))]
        runs = [anything, b"\x80" + "漢🦊".encode() * 5, "🦊漢é".encode(), "é".encode() * 30]
        tokens += [kind.token_of[byte] for byte in rng.choice(runs)]
        tokens += [kind.letter] * rng.choice([1, 3])
    tokens += [kind.token_of[byte] for byte in "🦊".encode()[: rng.randrange(4)]]
    pieces = run(TextStream(kind.decode), tokens)
    assert pieces == certain_pieces(kind.decode, tokens)
    assert "".join(pieces) == kind.decode(tokens)


@pytest.mark.parametrize("of", ["wrong bytes", "lines behind a wrong byte", "no text"])
def test_what_is_held_back_is_not_decoded_again_for_each_token(kind: Kind, of: str) -> None:
    """Neither as the tokens come, nor all at once where a later attempt goes on behind them."""
    tokens = {
        "wrong bytes": [kind.token_of[0x80]] * 3000,
        "lines behind a wrong byte": [kind.token_of[0x80], *[kind.token_of[10]] * 2999],
        "no text": [kind.silent] * 3000,
    }[of]
    num_decoded = 0

    def counting(token_ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return kind.decode(token_ids)

    assert "".join(run(TextStream(counting), tokens)) == kind.decode(tokens)
    TextStream(counting).replay(tokens)
    assert num_decoded < 100 * len(tokens)
