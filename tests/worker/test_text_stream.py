"""Text comes whole: no half characters, stop strings cut exactly, any attempt goes on alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.text_stream import TextStream
from worker.tokenizer import ByteTokenizer

decode = ByteTokenizer().decode

texts = st.text(st.sampled_from("ab é→🦊👩‍🚀漢字\n"), max_size=30)
stops = st.lists(st.text(st.sampled_from("ab é🦊"), min_size=1, max_size=4), max_size=3)


def run(stream: TextStream, tokens: bytes) -> list[str]:
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
    else:
        assert got == text
        assert not stream.stopped


def test_only_what_could_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(decode, stop=["END"])
    assert [stream.push(token) for token in b"a EN"] == ["a", " ", "", ""]
    assert stream.push(ord("x")) == "ENx"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    stream = TextStream(decode, stop=["b"], min_tokens=3)
    assert run(stream, b"abab")[:3] == ["a", "b", "a"]
    assert stream.stopped


@given(texts, stops, st.integers(0, 60), st.integers(0, 5))
def test_an_attempt_goes_on_where_an_earlier_one_stopped(
    text: str, stop: list[str], at: int, min_tokens: int
) -> None:
    tokens = text.encode()
    undisturbed = "".join(run(TextStream(decode, stop=stop, min_tokens=min_tokens), tokens))
    first = TextStream(decode, stop=stop, min_tokens=min_tokens)
    emitted = "".join(first.push(token) for token in tokens[:at])
    second = TextStream(decode, stop=stop, min_tokens=min_tokens)
    assert second.replay(tokens[:at], emitted) == ""
    rest = "" if second.stopped else "".join(run(second, tokens[at:]))
    assert emitted + rest == undisturbed
