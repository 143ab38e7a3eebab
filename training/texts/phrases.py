"""A template language of two rules, small enough to write a story grammar in.

``[one|two|three]`` becomes one of its alternatives (they nest, and may be empty), and
``{name.field}`` becomes an attribute of something in the story. What ends up at the start of a
sentence is given its capital letter.
"""

import random
import re
from collections.abc import Mapping, Sequence

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SENTENCE_START = re.compile(r"(^|\n|[.!?] )([a-z])")
_VOWEL_SOUND = re.compile(r"[aeiou]", re.IGNORECASE)


def an(phrase: str) -> str:
    """The phrase behind its indefinite article: ``an owl``, ``a quiet village``."""
    return f"{'an' if _VOWEL_SOUND.match(phrase) else 'a'} {phrase}"


def listed(text: str, separator: str = "|") -> tuple[str, ...]:
    """The phrases of a text: ``by the well|in the barn``."""
    return tuple(text.split(separator))


def one_of(rng: random.Random, options: Sequence[str]) -> str:
    """Any of the options, all equally likely."""
    return options[rng.randrange(len(options))]


def choose(rng: random.Random, template: str) -> str:
    """The template with every choice made, its fields still open."""
    while match := _CHOICE.search(template):
        chosen = one_of(rng, match[1].split("|"))
        template = template[: match.start()] + chosen + template[match.end() :]
    return template


def render(rng: random.Random, template: str, fields: Mapping[str, object]) -> str:
    """One text of the template.

    Raises ``KeyError`` or ``AttributeError`` for a field that the story does not have.
    """
    text = choose(rng, template).format_map(fields)
    text = re.sub(r" {2,}", " ", text).strip()
    return _SENTENCE_START.sub(lambda match: match[1] + match[2].upper(), text)
