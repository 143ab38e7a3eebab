"""What a call to a path or with a method that is not served is told."""

from __future__ import annotations

from difflib import get_close_matches

from fastapi import FastAPI
from starlette.routing import Match
from starlette.types import Scope

_LONGEST_PATH = 100
_PREFIX = "/v1"
_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")


def unknown_path(app: FastAPI, method: str, path: str) -> str:
    """Names the path that was probably meant, and the calls that there are."""
    served = [*app.openapi()["paths"]]
    # Often the base URL of a client has no /v1, or has it twice.
    meant = [it for it in (_PREFIX + path, path.removeprefix(_PREFIX)) if it in served]
    meant += get_close_matches(path[:_LONGEST_PATH], served, n=1)
    hint = f"; do you mean {meant[0]}?" if meant else ""
    paths = ", ".join(it for it in served if it.startswith(_PREFIX))
    return (
        f"{method} {path[:_LONGEST_PATH]} is not served{hint} (there are {paths}; /docs describes"
        " all)"
    )


def allowed_methods(app: FastAPI, scope: Scope) -> str:
    """Returns the methods with which the path of a call is served."""
    calls = {method: {**scope, "method": method} for method in _METHODS}
    return ", ".join(
        method
        for method, call in calls.items()
        if any(route.matches(call)[0] is Match.FULL for route in app.routes)
    )


def wrong_method(method: str, path: str, allowed: str) -> str:
    """Names the methods that the path has."""
    return f"{method} {path[:_LONGEST_PATH]} is not served; this path takes {allowed}"
