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
_SUBSCRIPTIONS = "promptq.producer.clients.subscriptions"
_LEASES = "promptq.worker.leases"

MUTANTS = {
    "stream-repeats": Mutant(
        _STREAM,
        "        if not event.is_last and event.end <= self._position:\n            return\n"
        "        if event.index < self._position and self._text_from is not None:\n"
        "            event = yield from self._beyond(event)\n",
        "",
    ),
    "stream-trusts-the-channel": Mutant(
        _STREAM, "return self.silence", "return 1e9  # never looks into the log again"
    ),
    "subscriptions-forget-a-channel": Mutant(
        _SUBSCRIPTIONS, "self._requested.clear()\n        self._unanswered", "self._unanswered"
    ),
    "coalescer-drops-waiting-tokens": Mutant(
        f"{_LEASES}.coalescer", "output.token_ids = before.token_ids + output.token_ids", "pass"
    ),
    "publisher-leaves-out-retries": Mutant(
        f"{_LEASES}.publisher",
        "lambda: self._queue.publish([row for _, row in rows], lengths), self._retry_seconds",
        "lambda: self._queue.publish([row for _, row in rows], lengths), 0.0",
    ),
    "returns-stop-at-an-error": Mutant(
        f"{_LEASES}.exchange",
        "                await asyncio.sleep(_RETRY_SECONDS)",
        "                return",
    ),
    "cancels-are-ignored": Mutant(
        f"{_LEASES}.exchange", "if is_request_id(request_id):", "if not request_id:"
    ),
    "renewals-come-late": Mutant(
        "promptq.worker.health.watchdogs", "_RENEWALS_PER_LEASE = 4", "_RENEWALS_PER_LEASE = 0.5"
    ),
    "abort-keeps-the-sequence": Mutant(
        f"{_LEASES}.held_and_lost_leases",
        "self._engine.abort(lease.prepared.sequence_id)",
        "pass",
    ),
    "prefetcher-never-polls": Mutant(
        f"{_LEASES}.prefetcher",
        "self._wake_up.work_came()  # perhaps a message was missed",
        "pass",
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
