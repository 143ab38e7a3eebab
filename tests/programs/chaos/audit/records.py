"""The records of a chaos run: requests sent, events seen, and the ends of workers."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from promptq.shared.protocol.events import TokenEvent
from tests.programs.chaos.processes.chaotic_worker import POISONED_CODE
from tests.support.model_free import tokens_of


class Queue(StrEnum):
    """The queues of a run. Each has separate workers."""

    VOLUME = "volume"
    """Model-free workers, under every fault."""
    REAL = "real"
    """The shipped model, under every fault but less often."""
    POISON = "poison"
    """Model-free workers that die only because of some requests."""
    FIRST = "first"
    SECOND = "second"
    """FIRST and SECOND share a worker, which loads one of their two models at a time."""
    UPSTREAM = "upstream"
    """Workers that forward to inference servers."""


FLEET = (Queue.VOLUME, Queue.REAL, Queue.POISON)
"""The queues of a run that names no other scenario."""


Logprob = tuple[int, float, int]
"""A chosen token: its id, its log-probability, its rank."""


class Kind(StrEnum):
    """How a request is meant to end."""

    PLAIN = "plain"
    CANCEL = "cancel"
    DEADLINE = "deadline"
    DELAY = "delay"
    TWICE = "twice"
    """Two producers send it at once, with one idempotency key."""
    POISON = "poison"


@dataclass(slots=True)
class Expected:
    """The answer of a request that runs to its end."""

    token_ids: list[int]
    text: str
    finish_reason: str
    """Empty: any reason, because an end token comes exactly at the length."""
    logprobs: list[Logprob] | None = None
    """One for each token, if the request wants them."""


@dataclass(slots=True)
class Sent:
    """The producer's record of an accepted request."""

    request_id: str
    queue: Queue
    kind: Kind
    fields: dict[str, Any]
    """The fields of its payload."""
    template: str = ""
    """In the queue of the shipped model: the key of the expected reference answer."""
    delay_ms: int = 0
    answers: list[str] = field(default_factory=list)
    """The ids that enqueueing returned, one for each producer that sent the request."""
    cancel_status: str = ""
    """Status of its first answered cancel."""

    @property
    def form(self) -> str:
        """A description, for people, of the rule that the request's output obeys."""
        rules = {"response_format": ", by a schema", "tool_choice": ", as a call"}
        return "".join(words for name, words in rules.items() if name in self.fields)

    def expected(self, references: dict[str, Expected]) -> Expected:
        """Returns the reference answer, or the model-free engine's answer for the seed."""
        if self.template:
            return references[self.template]
        tokens = tokens_of(self.fields["seed"], self.fields["max_tokens"])
        text = bytes(tokens).decode()
        stop = self.fields.get("stop")
        at = text.find(stop) if stop else -1
        reason = "length"
        if at >= 0:
            tokens, text, reason = tokens[: at + len(stop)], text[:at], "stop"
        asked = self.fields.get("logprobs") is not None
        return Expected(tokens, text, reason, [(it, 0.0, 1) for it in tokens] if asked else None)


@dataclass(slots=True)
class SeenEvent:
    """One event that reached a subscriber."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    attempt: int = 0
    logprobs: list[Logprob] | None = None

    @classmethod
    def of(cls, event: TokenEvent) -> SeenEvent:
        reason = event.finish_reason.value if event.finish_reason else None
        logprobs = None
        if event.logprobs is not None:
            logprobs = [(it.token_id, it.logprob, it.rank) for it in event.logprobs]
        return cls(event.index, event.token_ids, event.text, reason, event.attempt, logprobs)


@dataclass(slots=True)
class Seen:
    """One subscriber's record of one stream."""

    subscriber: str
    request_id: str
    events: list[SeenEvent]
    error: str = ""
    """The error that ended the stream, if no last event did."""

    @property
    def token_ids(self) -> list[int]:
        return [token_id for event in self.events for token_id in event.token_ids]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def logprobs(self) -> list[Logprob]:
        return [it for event in self.events for it in event.logprobs or ()]


@dataclass(frozen=True, slots=True)
class Claimed:
    """A worker's record of a claim."""

    request_id: str
    attempt: int
    num_tokens: int
    """Number of tokens in the log at the claim. Later tokens are from this attempt or later
    ones."""


class Journal:
    """A file of records, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, record: Sent | Seen) -> None:
        self._file.write(json.dumps({type(record).__name__: asdict(record)}) + "\n")

    def close(self) -> None:
        self._file.close()


def read_sent(path: Path) -> Iterator[Sent]:
    """Yields the sent requests in a file of records."""
    for fields in _records(path, "Sent"):
        fields["queue"], fields["kind"] = Queue(fields["queue"]), Kind(fields["kind"])
        yield Sent(**fields)


def read_seen(path: Path) -> Iterator[Seen]:
    """Yields the streams of subscribers in a file of records."""
    for fields in _records(path, "Seen"):
        yield Seen(events=[_seen_event(**event) for event in fields.pop("events")], **fields)


def read_claimed(path: Path) -> Iterator[Claimed]:
    """Yields the claims in a worker's log."""
    with path.open() as lines:
        for line in lines:
            if line.startswith("{") and '"event": "claimed"' in line and line.endswith("\n"):
                told = json.loads(line)
                yield Claimed(told["request_id"], told["attempt"], told["num_tokens"])


def _seen_event(logprobs: list[list[Any]] | None, **fields: Any) -> SeenEvent:
    found = None if logprobs is None else [(int(it[0]), it[1], it[2]) for it in logprobs]
    return SeenEvent(**fields, logprobs=found)


def _records(path: Path, name: str) -> Iterator[dict[str, Any]]:
    with path.open() as lines:
        for line in lines:
            if line.startswith(f'{{"{name}":') and line.endswith("\n"):  # else it is being written
                yield json.loads(line)[name]


_NO_SERVER = "promptq worker: no Redis server answers at "
"""The message of a starting worker. A serving worker tries for a minute, longer than any fault."""

ALLOWED = {
    "killed",
    "poisoned",
    "drained, exit code 0",
    "drained by the last release, exit code -15",
    "met no server as it started",
    "exit code 0 at the end",
}
"""All ends that a schedule and its requests cause. Any other end of a worker is a violation."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How one worker process ended."""

    queue: Queue
    code: int | None
    """-n if signal n ended it; None if it was killed because it did not drain."""
    sent: frozenset[signal.Signals] = frozenset()
    """Signals that the run had sent to the process."""
    was_ready: bool = True
    last_words: str = ""
    is_last: bool = False
    """Whether the run was over, so that all processes were ending."""
    is_earlier: bool = False
    """Whether the process was of the last release. A SIGTERM kills such a process while its
    interpreter ends; this release ignores it then."""

    @property
    def reason(self) -> str:
        if self.is_earlier and self.code == -signal.SIGTERM and signal.SIGTERM in self.sent:
            return "drained by the last release, exit code -15"
        if self.is_last:
            if self.code is None:
                return "did not drain at the end"
            return f"exit code {self.code} at the end"
        if self.code == -signal.SIGKILL and signal.SIGKILL in self.sent:
            return "killed"
        if self.code == POISONED_CODE and self.queue is Queue.POISON:
            return "poisoned"
        if signal.SIGTERM in self.sent:
            return f"drained, exit code {self.code}"
        if self.code == 1 and not self.was_ready and self.last_words.startswith(_NO_SERVER):
            return "met no server as it started"
        return f"by itself, exit code {self.code}"
