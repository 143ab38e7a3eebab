"""Lets libraries keep what they compute anew at each call, though it stays the same."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from tests.support import quick_interpreter


def install() -> None:
    """Call it once all modules are imported."""
    if redis := sys.modules.get("redis.utils"):
        _keep_version(redis)
    if http := sys.modules.get("httpcore2"):
        _keep_certificates(http)
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        quick_interpreter.install(interpreter)
    if kubernetes := sys.modules.get("kubernetes_validate.utils"):
        _keep_schemas(kubernetes)


def _keep_version(utils: Any) -> None:
    """Each connection of redis-py reads the version from the files of its package."""
    utils.get_lib_version = cache(utils.get_lib_version)


def _keep_certificates(http: Any) -> None:
    """Each HTTP client reads all certificates of the system."""
    http.default_ssl_context = cache(http.default_ssl_context)


def _keep_schemas(kubernetes: Any) -> None:
    """Each validation reads all definitions of a version of Kubernetes."""
    kubernetes.schema_contents = cache(kubernetes.schema_contents)
