"""Builds the work lists that a model's layers request, so that they travel with its inputs."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from promptq.worker.engine.attention import decode_work, prefill_work
from promptq.worker.engine.attention.types import AskedLists, StepLayout

Lists = dict[Hashable, npt.NDArray[np.int32]]


def lists_of(asked: AskedLists, layout: StepLayout) -> Lists:
    """The lists of a step, by SpanList, or by the size of tiles."""
    lists: dict[Any, npt.NDArray[np.int32]] = {}
    if decodes := layout.context_lens[: layout.num_decodes]:
        lists |= {spans: decode_work.cut(decodes, spans) for spans in asked.spans}
    if len(layout.context_lens) > layout.num_decodes:
        for size in asked.tile_sizes(prefill_work.longest_chunk(layout)):
            lists[size] = prefill_work.cut(layout, size)
    return lists
