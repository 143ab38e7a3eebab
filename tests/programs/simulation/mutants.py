"""Modules of promptq with one fault each, which the worlds must find."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType


@dataclass(frozen=True, slots=True)
class Mutant:
    """A module that has `new` in place of `old`, which stands in it once."""

    module: str
    old: str
    new: str

    def install(self) -> None:
        """Break the module when it is imported, which must come later."""
        assert self.module not in sys.modules
        sys.meta_path.insert(0, _Finder(self))

    def broken(self, source: str) -> str:
        """Returns the broken source. Raises ValueError without `old`."""
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


_STREAM = "promptq.producer.clients.resumable_stream"
_LEASES = "promptq.worker.leases"

MUTANTS = {
    "stream-repeats": Mutant(
        _STREAM,
        "        if not event.is_last and event.end <= self._position:\n            return\n"
        "        if event.index < self._position and self._text_from is not None:\n"
        "            event = yield from self._beyond(event)\n",
        "",
    ),
    "coalescer-drops-waiting-tokens": Mutant(
        f"{_LEASES}.coalescer", "output.token_ids = before.token_ids + output.token_ids", "pass"
    ),
    "reaper-never-reaps": Mutant(
        "promptq.worker.health.reaper", "while (await self._queue.reap()).has_more:", "while False:"
    ),
    "idle-worker-spins": Mutant(
        f"{_LEASES}.prefetcher",
        "if not await self._wake_up.wait(seconds):",
        "if not await self._wake_up.wait(seconds / 100):",
    ),
}
