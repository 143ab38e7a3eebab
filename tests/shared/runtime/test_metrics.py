"""The names of metrics, and the board that shows them."""

from __future__ import annotations

import json
import re

from promptq.shared.runtime import metrics
from promptq.shared.runtime.metrics import Histogram
from tests.support.paths import BOARD, expressions

SUFFIXES = {"gauge": [""], "counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
EXPOSED = {spec.full_name + suffix: spec for spec in metrics.ALL for suffix in SUFFIXES[spec.kind]}


def test_every_metric_has_a_name_and_buckets_of_its_kind() -> None:
    names = [spec.full_name for spec in metrics.ALL]
    assert len(set(names)) == len(names) > 30
    for spec in metrics.ALL:
        assert re.fullmatch(r"promptq_[a-z0-9_]+", spec.full_name)
        assert bool(spec.buckets) == (spec.kind == "histogram")
        assert list(spec.buckets) == sorted(spec.buckets)


def test_a_value_at_a_bound_is_in_that_bucket() -> None:
    histogram = Histogram(metrics.ATTEMPTS)
    for attempts in (1, 2, 4, 11):
        histogram.add(attempts)
    histogram.add(3, count=2)
    buckets, total = histogram.exposed()
    assert buckets == [("1.0", 1), ("2.0", 2), ("3.0", 4), ("5.0", 5), ("10.0", 5), ("+Inf", 6)]
    assert total == 1 + 2 + 4 + 11 + 3 + 3


def test_the_board_asks_only_for_metrics_and_labels_that_exist() -> None:
    assert len(expressions()) > 30
    for expression in expressions():
        named = re.findall(r"(promptq_\w+)(\{[^}]*\})?", expression)
        assert named, expression
        for name, selector in named:
            assert name in EXPOSED, expression
            for label in re.findall(r"(\w+)\s*=", selector):
                assert label in (*EXPOSED[name].labels, "le"), expression
        by = re.findall(r"by \(([^)]*)\)", expression)
        for label in ", ".join(by).replace(" ", "").split(",") if by else []:
            allowed = {it for name, _ in named for it in EXPOSED[name].labels} | {"le"}
            assert label in allowed, expression


def test_the_board_shows_all_there_is_but_what_repeats_itself() -> None:
    shown = {
        EXPOSED[name].name
        for expression in expressions()
        for name in re.findall(r"promptq_\w+", expression)
    }
    assert {spec.name for spec in metrics.ALL} - {metrics.REQUEST_MOST_OUTPUT.name} == shown


def test_the_boards_panels_do_not_lie_on_each_other() -> None:
    cells = set()
    for panel in json.loads(BOARD.read_text())["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in cells, panel["title"]
                cells.add((x, y))
