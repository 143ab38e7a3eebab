"""Makes imports in promptq's processes faster."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_METRICS = "opentelemetry.sdk.metrics"


@contextmanager
def quick_imports() -> Iterator[None]:
    """Context manager for imports without garbage collection and without OpenTelemetry's metrics.

    An import creates many objects that stay. The garbage collector would spend a quarter of the
    import's time on searching these objects. redis-py imports the metrics if they are installed,
    but uses them only if a program sets them up. promptq's processes never set them up. A user's
    program may set them up, so promptq as a library imports redis-py normally.
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
