"""Breaks one module of promptq, or one Lua script, in this process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType


@dataclass(frozen=True, slots=True)
class Mutant:
    """A broken module: `new` replaces `old`, a text that the module's source has exactly once."""

    module: str
    old: str
    new: str

    def install(self) -> None:
        """Break the module when it is imported. Call this before the import."""
        assert self.module not in sys.modules
        sys.meta_path.insert(0, _Finder(self))

    def broken(self, source: str) -> str:
        """Returns the broken source. Raises ValueError unless the source has `old` exactly once."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.old!r} does not stand once in {self.module}")
        return source.replace(self.old, self.new)


class _Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._mutant.module:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(self._mutant, spec.origin)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, mutant: Mutant, path: str) -> None:
        super().__init__(mutant.module, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        source = self._mutant.broken(self.get_data(self.path).decode())
        return compile(source, self.path, "exec")


@dataclass(frozen=True, slots=True)
class ScriptMutant:
    """A broken script: `name` is a mutant in CHAOS_MUTANTS of `tests/programs/states`."""

    name: str

    def install(self) -> None:
        """Make all processes of later worlds send the broken script."""
        from promptq.shared.queue import call, request_queue
        from tests.programs.states.mutants import CHAOS_MUTANTS

        texts = CHAOS_MUTANTS[self.name].texts()
        call.script_text = request_queue.script_text = texts.__getitem__
