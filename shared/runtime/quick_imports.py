"""Makes imports in promptq's processes faster."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_METRICS = ("opentelemetry.metrics", "opentelemetry.sdk.metrics")


@contextmanager
def quick_imports() -> Iterator[None]:
    """Context manager for imports without garbage collection and without OpenTelemetry's metrics.

    An import creates many objects that stay. The garbage collector would spend a quarter of the
    import's time on searching these objects. redis-py imports the metrics if they are installed,
    but uses them only if a program sets them up. promptq's processes never set them up. A user's
    program may set them up, so promptq as a library imports redis-py normally.
    """
    hidden = [name for name in _METRICS if name not in sys.modules]
    was_enabled = gc.isenabled()
    gc.disable()
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment] # it cannot be imported
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        if was_enabled:
            gc.enable()
