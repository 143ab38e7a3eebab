"""A grammar of little stories: the English text that the shipped model learns from.

``python -m training.texts.stories --count 3 --seed 0`` prints some.
"""

import argparse
import random
from dataclasses import dataclass

from training.texts.phrases import one_of, render
from training.texts.plots import ENDINGS, HABITS, OPENINGS, PLOTS, SPOTS, Plot
from training.texts.words import (
    KINDS,
    PLACES,
    THINGS,
    Character,
    Item,
    Scene,
    character,
    item,
    scene,
)

PARAGRAPHS_SHARE = 0.3
LESSON_SHARE = 0.3
TYPESET_QUOTES_SHARE = 0.08
EMOJI_SHARE = 0.04
EMOJI = ("🌟", "🦊", "🌙", "🌈", "🏡", "❤️", "🎈", "🐾")


@dataclass(frozen=True)
class Tale:
    """A story, and its characters, things, place and plot."""

    text: str
    plot: Plot
    hero: Character
    friend: Character
    thing: Item
    place: Scene


def typeset(text: str) -> str:
    """Returns the text with “typeset” instead of "typewriter" quotes."""
    parts = text.split('"')
    return "".join(
        part + ("" if i == len(parts) - 1 else "“" if i % 2 == 0 else "”")
        for i, part in enumerate(parts)
    )


def tale(rng: random.Random) -> Tale:
    """Returns one story of about 120 to 250 tokens, with its subjects."""
    hero_kind, friend_kind, elder_kind = rng.sample(KINDS, 3)
    hero = character(rng, hero_kind)
    friend = character(rng, friend_kind, taken=(hero.name,))
    elder = character(rng, elder_kind, taken=(hero.name, friend.name))
    thing, gift = (item(rng, thing) for thing in rng.sample(THINGS, 2))
    place = scene(rng, PLACES[rng.randrange(len(PLACES))])
    plot = PLOTS[rng.randrange(len(PLOTS))]
    spot, spot2, spot3 = rng.sample(SPOTS, 3)
    fields: dict[str, object] = {
        "hero": hero,
        "friend": friend,
        "elder": elder,
        "thing": thing,
        "gift": gift,
        "place": place,
        "spot": spot,
        "spot2": spot2,
        "spot3": spot3,
    }
    lines = [
        render(rng, one_of(rng, beat), fields) for beat in (OPENINGS, HABITS, *plot.beats, ENDINGS)
    ]
    if rng.random() < LESSON_SHARE:
        lines.append(one_of(rng, plot.lessons))
    if rng.random() < EMOJI_SHARE:
        lines.append(one_of(rng, EMOJI))
    text = _join(rng, [line for line in lines if line])
    if rng.random() < TYPESET_QUOTES_SHARE:
        text = typeset(text)
    return Tale(text, plot, hero, friend, thing, place)


def story(rng: random.Random) -> str:
    """Returns one story. Equal states of ``rng`` lead to equal stories."""
    return tale(rng).text


def _join(rng: random.Random, lines: list[str]) -> str:
    break_share = 0.35 if rng.random() < PARAGRAPHS_SHARE else 0.0
    text = lines[0]
    for line in lines[1:]:
        text += ("\n\n" if rng.random() < break_share else " ") + line
    return text


def main() -> None:
    """Print some stories."""
    parser = argparse.ArgumentParser(description="Print stories of the grammar.")
    parser.add_argument("--count", type=int, default=1, help="number of stories (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the stories (default: 0)")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    print("\n\n---\n\n".join(story(rng) for _ in range(arguments.count)))


if __name__ == "__main__":
    main()
