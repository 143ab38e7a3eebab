"""Exercises in copying from earlier text: a few plain sentences about the same people and things.

A model of this size learns late, or never, to copy a name from earlier text. If every line of a
text repeats a name, the model learns to copy within a hundred steps. So training begins with such
texts.
"""

import random

from training.texts.phrases import choose, one_of, render
from training.texts.plots import OPENINGS, SPOTS
from training.texts.words import KINDS, PLACES, THINGS, character, item, scene

LINES = (
    "{hero.name} was {hero.an_old}.",
    "{hero.the} was called {hero.name}.",
    "{hero.name} lived {place.in_a}.",
    "{hero.name} had {thing.a_red}.",
    "{hero.name} was {hero.trait}.",
    "{friend.name} was {friend.trait}.",
    "{friend.name} was {friend.an_old}.",
    "{friend.name} met {hero.name} {spot}.",
    "{hero.name} and {friend.name} sat {spot}.",
    "{hero.name} looked at {friend.name}.",
    "{hero.name} gave {thing.the} to {friend.name}.",
    "{friend.name} thanked {hero.name}.",
    "{thing.the} belonged to {hero.name}.",
    "{thing.the} was {thing.look}.",
    "{thing.the} lay {spot}.",
    '"Hello," said {hero.name}.',
    '"Hello," said {friend.name}.',
    '"Look!" cried {friend.name}.',
    '"Where is my {thing.name}?" asked {hero.name}.',
    '"Is this your {thing.name}?" asked {friend.name}.',
)


WISHES = (
    "[Tell me|Write|Write me|Please tell me] a [|short|little] story about {hero.a} and {thing.a}.",
    "[Tell me|Write|Write me|Please tell me] a [|short|little] story about {hero.an_old}.",
    "[Tell me|Write|Write me|Please tell me] a [|short|little] story about {hero.name} the "
    "{hero.kind}.",
    "[Can you|Could you|Please] tell me about {hero.a} with {thing.a}?",
)


def sketch(rng: random.Random, least: int = 3, most: int = 8) -> str:
    """Returns ``least`` to ``most`` sentences in any order."""
    fields = _fields(rng)
    return " ".join(render(rng, line, fields) for line in _lines(rng, least, most))


def repetition(rng: random.Random) -> tuple[str, str]:
    """Returns a request to repeat a sentence, and the sentence."""
    said = sketch(rng, 1, 3)
    return choose(rng, "[Repeat after me:|Please repeat:|Say this:]") + " " + said, said


def tiny_story(rng: random.Random) -> tuple[str, str]:
    """Returns a request for a story, and only the story's beginning."""
    fields = _fields(rng)
    lines = (one_of(rng, OPENINGS), "{hero.name} had {thing.a_red}.", *_lines(rng, 1, 2))
    wish = render(rng, one_of(rng, WISHES), fields)
    return wish, " ".join(render(rng, line, fields) for line in lines)


def _lines(rng: random.Random, least: int, most: int) -> list[str]:
    return rng.sample(LINES, rng.randint(least, most))


def _fields(rng: random.Random) -> dict[str, object]:
    hero_kind, friend_kind = rng.sample(KINDS, 2)
    hero = character(rng, hero_kind)
    return {
        "hero": hero,
        "friend": character(rng, friend_kind, taken=(hero.name,)),
        "thing": item(rng, THINGS[rng.randrange(len(THINGS))]),
        "place": scene(rng, PLACES[rng.randrange(len(PLACES))]),
        "spot": one_of(rng, SPOTS),
    }
