"""The plots of stories: events (beats) one after the other, each in several wordings.

A beat is a tuple of templates (see ``phrases``), of which a story uses one. With an empty template,
a story may leave the beat out. The wordings of a beat can be exchanged freely, so none may rely on
how another beat was worded. Fields: ``hero``, ``friend``, ``elder`` (characters), ``thing``,
``gift`` (items), ``place`` (a scene), and ``spot``, ``spot2``, ``spot3`` ("by the well").

In ``plots.txt``, each line is a template, ``-`` is an empty template, and a blank line ends a beat.
A line with ``#`` names the beats that all plots use, or the topic of a plot. The last beat of a
plot is its lessons.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Beat: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Plot:
    """One plot: its topic, its beats, and lessons for the end."""

    topic: str
    beats: tuple[Beat, ...]
    lessons: tuple[str, ...]


def _section(text: str) -> tuple[str, list[Beat]]:
    name, *lines = text.splitlines()
    beats = "\n".join(lines).split("\n\n")
    return name, [tuple(line.removeprefix("-") for line in beat.splitlines()) for beat in beats]


_TEXT = Path(__file__).with_suffix(".txt").read_text("utf-8")
(_, [SPOTS]), (_, [OPENINGS]), (_, [HABITS]), (_, [MEETINGS]), (_, [ENDINGS]), *_PLOTS = (
    _section(text) for text in _TEXT.removeprefix("# ").split("\n\n# ")
)
PLOTS = tuple(
    Plot(topic, tuple(MEETINGS if beat == ("(meetings)",) else beat for beat in beats), lessons)
    for topic, [*beats, lessons] in _PLOTS
)
