"""Makes libraries keep values that they would compute again at each call."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any


def install() -> None:
    """Install all caches. Call this after all modules were imported."""
    if redis := sys.modules.get("redis.utils"):
        _keep_version(redis)
    if http := sys.modules.get("httpcore2"):
        _keep_certificates(http)
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        _quicken(interpreter)
    if kubernetes := sys.modules.get("kubernetes_validate.utils"):
        _keep_schemas(kubernetes)


def _keep_version(utils: Any) -> None:
    """Keeps redis-py's version, which each connection would read from the package's files."""
    utils.get_lib_version = cache(utils.get_lib_version)


def _keep_certificates(http: Any) -> None:
    """Keeps the system's certificates, which each HTTP client would read."""
    http.default_ssl_context = cache(http.default_ssl_context)


def _keep_schemas(kubernetes: Any) -> None:
    """Keeps the definitions of a version of Kubernetes, which each validation would read."""
    kubernetes.schema_contents = cache(kubernetes.schema_contents)


def _quicken(interpreter: Any) -> None:
    """Makes Triton's interpreter keep values that do not change, and skip values that it throws
    away."""
    _replace_builtins_once(interpreter)
    _keep_number_types(interpreter)
    _keep_types_and_shapes(interpreter.tl)
    # With `debug` it would assert that no integer overflows. Without, it only computes whether.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _replace_builtins_once(interpreter: Any) -> None:
    """Replaces functions of the language only at a launch, and looks them up once. The interpreter
    would do both at each launch, and at each call of a device function within a launch."""
    language, replace_language = interpreter.tl, interpreter._patch_lang
    is_builtin = language.core.is_builtin

    @cache
    def builtins_of(package: Any) -> list[tuple[str, Any]]:
        return [each for each in inspect.getmembers(package) if is_builtin(each[1])]

    @cache
    def packages_of(function: Any) -> list[Any]:
        packages = filter(inspect.ismodule, function.__globals__.values())
        return [each for each in packages if each in (language, language.core)]

    def replace_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins_of(package):
            if getattr(package, name) is member:  # a launch has not replaced it yet
                interpreter._patch_attr(package, name, member, builder, scope)

    def replace_for(function: Any) -> Any:
        replaced = (language.tensor.__add__, *(each.load for each in packages_of(function)))
        if any(map(is_builtin, replaced)):
            return replace_language(function)
        return interpreter._LangPatchScope()

    interpreter._patch_builtin = replace_builtins
    interpreter._patch_lang = replace_for


def _keep_number_types(interpreter: Any) -> None:
    compute, known = interpreter._get_np_dtype, dict[str, Any]()

    def number_type_of(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in known:
            known[scalar.name] = compute(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = number_type_of


def _keep_types_and_shapes(language: Any) -> None:
    """Keeps types, and one shape for each type. The interpreter would make both for each value."""
    core, block_type = language.core, language.block_type
    check_type, blocks = block_type.__init__, dict[tuple[int, Any], dict[str, Any]]()
    others = dict[tuple[int, int], tuple[Any, Any, Any]]()

    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        shape = core.tuple([core.constexpr(size) for size in sizes])
        return shape, core.constexpr(math.prod(sizes))

    of_scalars = shape_of(())

    def make_block_type(self: Any, element_type: Any, shape: Sequence[Any]) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = id(element_type), sizes, *map(type, sizes)  # 16.0 is an error, but equals 16
        if key not in blocks:
            check_type(self, element_type, shape)
            self.of_values = shape_of(sizes)
            blocks[key] = self.__dict__  # it refers to the element's type, so the id stays its own
        self.__dict__.update(blocks[key])

    def with_element_type(self: Any, element_type: Any) -> Any:
        key = id(element_type), id(self.shape)
        if key not in others:
            others[key] = block_type(element_type, self.shape), element_type, self.shape
        return others[key][0]

    def make_tensor(self: Any, handle: Any, dtype: Any) -> None:
        self.handle, self.type, self.dtype = handle, dtype, dtype.scalar
        self.shape, self.numel = dtype.of_values if dtype.is_block() else of_scalars

    block_type.__init__ = make_block_type
    block_type.with_element_ty = with_element_type
    language.tensor.__init__ = make_tensor
    _unwrap_plain_values_at_once(core)


def _unwrap_plain_values_at_once(core: Any) -> None:
    unwrap = core._unwrap_if_constexpr
    plain = {int, float, bool, str, type(None), core.dtype, core.block_type, core.pointer_type}
    plain.add(core.tensor)

    def unwrap_quickly(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    core._unwrap_if_constexpr = unwrap_quickly
