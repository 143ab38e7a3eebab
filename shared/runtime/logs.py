"""Structured logs: colour for people at a terminal, JSON lines for programs."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Mapping, MutableMapping
from textwrap import indent
from typing import Any, TextIO, cast

import structlog

from promptq.shared.runtime.printable import printable

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_ACCESS_LOG = "uvicorn.access"


def configure_logs(level: str, form: str) -> None:
    """Send log lines of at least `level` to standard error, in the form auto, console or json.

    Lines from the standard `logging` take the same form: those of the engine and of uvicorn (run it
    with `log_config=None`) from `level` on, those of other libraries from warnings on.
    """
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console)
    common: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        stamp,
    ]
    rendering: list[Any] = [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(_json),
    ]
    if console:
        colors = sys.stderr.isatty()
        rendering = [
            _printable_values,
            structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_write_traceback),
        ]
    structlog.configure(
        processors=[*common, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        # Each line is one write, because others write there too.
        logger_factory=lambda *_: structlog.WriteLogger(_STANDARD_ERROR),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(_STANDARD_ERROR)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*common, _name_fields],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
            pass_foreign_args=True,
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(_LEVELS[level], logging.WARNING))
    for name in ("uvicorn", "promptq.worker.engine"):
        logging.getLogger(name).setLevel(_LEVELS[level])


def take_over_logs(*libraries: str) -> None:
    """Make these imported libraries log through the root logger's handler, and no other.

    Warnings of transformers are left out: most advise to install kernels that promptq does not use.
    """
    for name in libraries:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.ERROR if name == "transformers" else logging.NOTSET)


class _CurrentStandardError:
    """Standard error, looked up for each line: a program may replace and close the stream after a
    logger was bound."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


_STANDARD_ERROR = cast("TextIO", _CurrentStandardError())
"""Where all loggers write. They share this object, because it holds their lock."""


def get_logger(**bound: Any) -> structlog.typing.FilteringBoundLogger:
    """A logger with `bound` in every line."""
    return cast("structlog.typing.FilteringBoundLogger", structlog.get_logger(**bound))


bind = structlog.contextvars.bind_contextvars
"""Adds fields to every line that this task logs from now on, by any logger.

The code that serves an HTTP request binds its `request_id`, so that uvicorn's line has it too.
"""

unbind = structlog.contextvars.unbind_contextvars
"""Undoes a `bind`. Call it when the task continues with other work, or has inherited the fields."""


def _printable_values(_: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Make values safe to show: strangers write them, and a terminal obeys control characters."""
    for name, value in line.items():
        if name != "exc_info" and not name.startswith("_"):
            line[name] = printable(value if isinstance(value, str) else repr(value))
    return line


def _write_traceback(target: TextIO, exc_info: Any) -> None:
    """Write a traceback indented, so that no line of an exception looks like a line of the log."""
    plain = io.StringIO()
    structlog.dev.plain_traceback(plain, exc_info)
    target.write(indent(printable(plain.getvalue(), keep="\n"), "  "))


def _json(line: Any, **options: Any) -> str:
    """JSON in ASCII, in which DEL is the only unsafe character left."""
    return json.dumps(line, **options).replace("\x7f", "\\u007f")


def _name_fields(_: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the logger's name and fields to lines of the standard library. The fields are the members
    of a mapping that is logged with the text, or the parts of uvicorn's access lines."""
    values = line.pop("positional_args", ())
    line["logger"] = line["_record"].name
    if isinstance(values, Mapping):
        line.update(values)
    elif line["logger"] == _ACCESS_LOG and len(values) == 5:
        client, method, path, _version, status = values
        line["event"] = "answered"
        # A query may hold a secret.
        path = path.split("?")[0]
        line.update(client=client, method=method, path=path, status=status)
    return line
