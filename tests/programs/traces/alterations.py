"""Changes one call of a trace, as if a worker or the server had a fault that nobody noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from promptq.shared.protocol.rows import Row
from tests.programs.traces.trace_file import Entry

Entries = list[Entry]

_FENCE, _START, _END, _EVENT, _REASON = (
    2 + Row._fields.index(name) for name in ("fence", "start", "end", "event_json", "finish_reason")
)
"""Places of the first row's fields in the arguments of `publish`."""


def _places(entries: Entries, script: str, is_meant: Callable[[Entry], bool]) -> Iterator[int]:
    for at, entry in enumerate(entries):
        if entry.script == script and is_meant(entry):
            yield at


def _publish(entries: Entries, *, is_last: bool = False) -> int:
    """Returns the place of a call that publishes one row, in the middle of a stream or last."""

    def is_meant(entry: Entry) -> bool:
        if entry.args[1] != "1" or entry.reply[0] != ["ok"]:
            return False
        return entry.args[_REASON] != "" if is_last else entry.args[_START] not in ("0", "1")

    return next(_places(entries, "publish", is_meant))


def _with(entry: Entry, place: int, word: str) -> Entry:
    args = list(entry.args)
    args[place] = word
    return replace(entry, args=tuple(args))


def _given(entry: Entry) -> list[Any]:
    """Returns what a claim gave: a list for each request, with id, payload, fence, attempt, ..."""
    head = 4 if "skip" in entry.args else 3
    return list(entry.reply[head:]) if entry.reply[0] == "ok" else []


def skip_the_fence(entries: Entries) -> Entries:
    """A worker publishes for a request that another worker has claimed, and the server accepts the
    row."""
    fences: dict[str, str] = {}
    for at, entry in enumerate(entries):
        for request_id, _, fence, *_ in _given(entry) if entry.script == "claim" else ():
            old = fences.setdefault(request_id, fence)
            if old != fence:
                publishes = _places(
                    entries,
                    "publish",
                    lambda call, new=fence: (
                        call.args[1] == "1" and call.args[_FENCE] == new and call.reply[0] == ["ok"]
                    ),
                )
                for place in publishes:
                    if place > at:
                        return _replaced(entries, place, _with(entries[place], _FENCE, old))
    raise ValueError("no request of this trace has two attempts")


def _replaced(entries: Entries, at: int, *instead: Entry) -> Entries:
    return [*entries[:at], *instead, *entries[at + 1 :]]


def move_an_index(entries: Entries) -> Entries:
    at = _publish(entries)
    moved = entries[at]
    for place in (_START, _END):
        moved = _with(moved, place, str(int(moved.args[place]) + 1))
    return _replaced(entries, at, moved)


def count_another_attempt(entries: Entries) -> Entries:
    at = _publish(entries)
    attempt, _, nonce = entries[at].args[_FENCE].partition("-")
    return _replaced(entries, at, _with(entries[at], _FENCE, f"{int(attempt) + 1}-{nonce}"))


def omit_a_call(entries: Entries) -> Entries:
    return _replaced(entries, _publish(entries))


def repeat_a_publish(entries: Entries) -> Entries:
    at = _publish(entries)
    return _replaced(entries, at, entries[at], entries[at])


def lengthen_a_lease(entries: Entries) -> Entries:
    at = _publish(entries)
    return _replaced(entries, at, _with(entries[at], 0, "60000"))


def claim_what_is_held(entries: Entries) -> Entries:
    at = next(_places(entries, "claim", lambda entry: bool(_given(entry))))
    claim = entries[at]
    again = replace(claim, args=tuple(_of_another_worker(claim.args)))
    return _replaced(entries, at, claim, again)


def _of_another_worker(args: tuple[str, ...]) -> Iterator[str]:
    names = ("", *args)
    for name, word in zip(names, args, strict=False):
        yield "other" if name in ("worker", "nonce", "session") else word


def add_an_event_after_the_last(entries: Entries) -> Entries:
    at = _publish(entries, is_last=True)
    more = entries[at]
    count = int(more.args[_END])
    for place, word in ((_START, str(count)), (_END, str(count + 1)), (_REASON, "")):
        more = _with(more, place, word)
    return _replaced(entries, at, entries[at], more)


def renew_by_another_worker(entries: Entries) -> Entries:
    at = _publish(entries)
    entry = entries[at]
    attempt = entry.args[_FENCE].partition("-")[0]
    held = (entry.args[0], "0", entry.args[2], f"{attempt}-other", "")
    return _replaced(entries, at, replace(entry, args=held, reply=[[], ["ok"]]), entry)


def change_a_reply(entries: Entries) -> Entries:
    at = _publish(entries)
    return _replaced(entries, at, replace(entries[at], reply=[["gap"], entries[at].reply[1]]))


def change_a_token(entries: Entries) -> Entries:
    """All replies stay equal; only the result of the stream shows the change."""
    at = _publish(entries)
    before, _, after = entries[at].args[_EVENT].partition('"token_ids":[')
    return _replaced(entries, at, _with(entries[at], _EVENT, f'{before}"token_ids":[9{after}'))


ALTERATIONS = (
    skip_the_fence,
    move_an_index,
    count_another_attempt,
    omit_a_call,
    repeat_a_publish,
    lengthen_a_lease,
    claim_what_is_held,
    add_an_event_after_the_last,
    renew_by_another_worker,
    change_a_reply,
    change_a_token,
)
