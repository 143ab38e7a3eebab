"""Makes garbage collections rare in a long-running process."""

from __future__ import annotations

import gc

_OBJECTS_BEFORE_COLLECTION = 50_000
"""Number of new objects between two collections."""


def collect_rarely() -> None:
    """Collects garbage, and exempts all remaining objects from later collections, which are rare.

    Libraries and models stay until the end of the process. A full collection would search them, and
    stop every thread meanwhile: an engine's thread, and all streams.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION)
