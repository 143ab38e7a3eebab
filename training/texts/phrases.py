"""A template language of two rules, for the grammar of stories.

``[one|two|three]`` becomes one of its alternatives. Alternatives may contain further brackets, and
may be empty. ``{name.field}`` becomes an attribute of something in the story. The first letter of a
sentence becomes a capital.
"""

import random
import re
from collections.abc import Mapping, Sequence

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SENTENCE_START = re.compile(r"(^|\n|[.!?] )([a-z])")
_VOWEL_SOUND = re.compile(r"[aeiou]", re.IGNORECASE)


def an(phrase: str) -> str:
    """Returns the phrase with an indefinite article in front: ``an owl``, ``a quiet village``."""
    return f"{'an' if _VOWEL_SOUND.match(phrase) else 'a'} {phrase}"


def listed(text: str, separator: str = "|") -> tuple[str, ...]:
    """Returns the phrases of a text such as ``by the well|in the barn``."""
    return tuple(text.split(separator))


def one_of(rng: random.Random, options: Sequence[str]) -> str:
    """Returns one of the options. All options are equally likely."""
    return options[rng.randrange(len(options))]


def choose(rng: random.Random, template: str) -> str:
    """Returns the template after all choices are made. The fields are not filled in."""
    while match := _CHOICE.search(template):
        chosen = one_of(rng, match[1].split("|"))
        template = template[: match.start()] + chosen + template[match.end() :]
    return template


def render(rng: random.Random, template: str, fields: Mapping[str, object]) -> str:
    """Returns one text of the template. Raises ``KeyError`` or ``AttributeError`` for a field that
    the story does not have."""
    text = choose(rng, template).format_map(fields)
    text = re.sub(r" {2,}", " ", text).strip()
    return _SENTENCE_START.sub(lambda match: match[1] + match[2].upper(), text)
