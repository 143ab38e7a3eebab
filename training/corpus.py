"""The training data of the shipped model: documents of the grammar, cut into batches of tokens."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from training.texts.chats import Message, chat, short_exchange, statements
from training.texts.sketches import repetition, sketch, tiny_story
from training.texts.stories import story
from training.tokenizer import END_OF_TEXT, TURN_END, TURN_START

CHAT_SHARE = 0.5
STATEMENTS_SHARE = 0.04
STREAM_SHARE = 0.06
STREAM_DOCUMENTS = 6
POOL_ROWS = 256

EXERCISES = (repetition, tiny_story, short_exchange)

Encode = Callable[[list[str]], list[list[int]]]


@dataclass(frozen=True)
class Batch:
    """Rows of token ids of about equal length, not yet padded."""

    rows: list[list[int]]


def document(rng: random.Random) -> str:
    """Returns one document with its special tokens, the last of which is the end-of-text token."""
    draw = rng.random()
    if draw < CHAT_SHARE:
        text = conversation(chat(rng))
    elif draw < CHAT_SHARE + STATEMENTS_SHARE:
        text = statements(rng)
    else:
        text = story(rng)
    return text + END_OF_TEXT


def conversation(messages: list[Message]) -> str:
    """Returns the messages in ChatML, as the tokenizer's chat template writes them."""
    return "".join(f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in messages)


def exercise(rng: random.Random) -> str:
    """Returns a short text in which most words depend on the words before."""
    draw = rng.randrange(len(EXERCISES) + 2)
    if draw >= len(EXERCISES):
        return sketch(rng) + END_OF_TEXT
    question, answer = EXERCISES[draw](rng)
    messages: list[Message] = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    return conversation(messages) + END_OF_TEXT


def row(rng: random.Random) -> str:
    """Returns one training row: mostly a single document, seldom several of them.

    A single document needs no mask against other documents. Long rows teach the model about texts
    after an end token, and about high positions.
    """
    if rng.random() >= STREAM_SHARE:
        return document(rng)
    return "".join(document(rng) for _ in range(rng.randrange(2, STREAM_DOCUMENTS + 1)))


def batches(
    rng: random.Random,
    encode: Encode,
    batch_tokens: int,
    max_tokens: int,
    exercise_share: Callable[[int], float] = lambda _: 0.0,
) -> Iterator[Batch]:
    """Yields batches without end, each of at most ``batch_tokens`` tokens when padded.

    Cuts each row to ``max_tokens`` tokens. ``max_tokens`` must not exceed ``batch_tokens``.
    ``exercise_share`` returns the share of rows that are exercises. Its argument is the number of
    batches so far.
    """
    done = 0
    while True:
        share = exercise_share(done)
        texts = [exercise(rng) if rng.random() < share else row(rng) for _ in range(POOL_ROWS)]
        pool = [ids[:max_tokens] for ids in encode(texts)]
        pool.sort(key=len, reverse=True)
        cut: list[Batch] = []
        while pool:
            count = max(1, batch_tokens // len(pool[0]))
            cut.append(Batch(pool[:count]))
            del pool[:count]
        rng.shuffle(cut)
        done += len(cut)
        yield from cut
