"""Limits the CPU time of Python code, by an exception in the thread that runs the code."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_LINES_PER_LOOK = 128


class CpuTimeLimitError(BaseException):
    """Raised in code that has exceeded its CPU time.

    The class is no subclass of Exception, so that the code does not catch the error and continue
    without a limit.
    """


@contextmanager
def cpu_time_limit(seconds: float, quick_file: str = "") -> Iterator[None]:
    """Inside this context, raise CpuTimeLimitError in Python functions after `seconds` of CPU time.

    The time is checked after every 128 lines or calls of Python functions. The check ends every
    loop in Python, but cannot end a call into C. Lines of functions in the file `quick_file` do not
    count, so these functions run at full speed. Calls of these functions do count.
    """
    left = _LINES_PER_LOOK
    ends_at = time.thread_time() + seconds

    def look(_frame: FrameType, _event: str, _argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left <= 0:
            left = _LINES_PER_LOOK
            if time.thread_time() > ends_at:
                raise CpuTimeLimitError
        return look

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        look(frame, event, argument)
        return None if frame.f_code.co_filename == quick_file else look

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)
