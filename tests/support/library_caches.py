"""Lets libraries keep what they compute anew at each call, though it stays the same."""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import Any


def install() -> None:
    """Call it once all modules are imported."""
    if redis := sys.modules.get("redis.utils"):
        _keep_version(redis)
    if http := sys.modules.get("httpcore2"):
        _keep_certificates(http)
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        _keep_members(interpreter)
    if kubernetes := sys.modules.get("kubernetes_validate.utils"):
        _keep_schemas(kubernetes)


def _keep_version(utils: Any) -> None:
    """Each connection of redis-py reads the version from the files of its package."""
    utils.get_lib_version = cache(utils.get_lib_version)


def _keep_certificates(http: Any) -> None:
    """Each HTTP client reads all certificates of the system."""
    http.default_ssl_context = cache(http.default_ssl_context)


def _keep_members(interpreter: Any) -> None:
    """Triton's interpreter replaces functions of its language at each launch and each call of a
    device function, and looks all of them up before."""
    compute_number_type, number_types = interpreter._get_np_dtype, dict[str, Any]()

    def number_type_of(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in number_types:
            number_types[scalar.name] = compute_number_type(scalar)
        return number_types[scalar.name]

    @cache
    def builtins_of(package: Any) -> list[tuple[str, Any]]:
        is_builtin = interpreter.tl.core.is_builtin
        return [each for each in inspect.getmembers(package) if is_builtin(each[1])]

    def replace_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins_of(package):
            if getattr(package, name) is member:  # a launch has not replaced it yet
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = replace_builtins
    interpreter._get_np_dtype = number_type_of


def _keep_schemas(kubernetes: Any) -> None:
    """Each validation reads all definitions of a version of Kubernetes."""
    kubernetes.schema_contents = cache(kubernetes.schema_contents)
