"""Makes the imports of promptq's processes faster."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_METRICS = "opentelemetry.sdk.metrics"


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without garbage collection, and redis-py without OpenTelemetry's metrics.

    An import makes many objects that stay, and searching them again and again would take a quarter
    of its time. redis-py loads the metrics where they are installed, but uses them only if a
    program sets them up. promptq's processes never do; a user's program may, so it imports redis-py
    in the usual way.
    """
    is_absent = _METRICS not in sys.modules
    was_enabled = gc.isenabled()
    gc.disable()
    if is_absent:
        sys.modules[_METRICS] = None  # type: ignore[assignment] # it cannot be imported
    try:
        yield
    finally:
        if is_absent:
            del sys.modules[_METRICS]
        if was_enabled:
            gc.enable()
