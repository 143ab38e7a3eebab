"""A long-running process collects its garbage once after the start, and then rarely."""

from __future__ import annotations

import gc
import weakref

from promptq.shared.runtime.garbage_collection import collect_rarely


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_present_objects_are_exempt_and_garbage_is_not() -> None:
    threshold = gc.get_threshold()
    garbage = weakref.ref(Node())
    kept = Node()
    try:
        collect_rarely()
        assert garbage() is None
        assert gc.get_freeze_count() > 0
        assert not any(known is kept for known in gc.get_objects())
        assert gc.get_threshold()[0] > threshold[0]
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
