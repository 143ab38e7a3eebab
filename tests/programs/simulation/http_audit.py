"""Checks the answers that clients of gateways have read, over all connections of each client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tests.programs.chaos.audit.auditor import FINAL_STATES, Violation
from tests.programs.simulation.http_clients import HttpStream
from tests.programs.simulation.notes import Notes, Request

_MOST_SECONDS_AFTER_LEAVING = 0.3
"""Seconds in a world without faults after which a request ends whose client departed."""
_STATES = {"cancelled": "cancelled", "deadline_exceeded": "expired"}
"""The state of a request, by the code of the error that its client may read."""


def check_http(
    streams: Iterable[HttpStream], requests: Mapping[str, Request], notes: Notes
) -> Iterator[Violation]:
    """Yields a violation for each answer that is not whole, or has a repeated or changed part. Also
    yields one for each request that runs on after its client has left."""
    for stream in streams:
        request_id = stream.request.request_id
        found = requests.get(request_id)
        state = found.record.get("state", "nowhere") if found else "nowhere"
        for wrong in stream.wrong:
            yield Violation("http frame", request_id, wrong)
        for wrong in _wrong_in(stream, state):
            yield Violation("http answer", request_id, f"{wrong}; it is {state}")
        if stream.left_at is None:
            if not stream.is_over:
                yield Violation("http answer", request_id, "it did not end")
        elif found and notes.is_calm(stream.left_at) and state in FINAL_STATES:
            ended = found.finished_at
            if ended is not None and ended > stream.left_at + _MOST_SECONDS_AFTER_LEAVING:
                seconds = f"{ended - stream.left_at:.3f} s"
                yield Violation("late cancel", request_id, f"runs {seconds} without a client")


def _wrong_in(stream: HttpStream, state: str) -> Iterator[str]:
    expected = stream.request.expected({})
    if not expected.text.startswith(stream.text):
        yield f"{stream.text!r} is no beginning of {expected.text!r}"
    if stream.code:
        if _STATES.get(stream.code) != state:
            yield f"it ends with the error {stream.code}"
        return
    if not stream.is_over:
        return
    if len(stream.finish_reasons) != 1:
        yield f"it has the finish reasons {stream.finish_reasons}"
    num_tokens = set(stream.usages)
    if state == "completed":
        if stream.text != expected.text:
            yield f"{stream.text!r} is not the whole of {expected.text!r}"
        if stream.finish_reasons != [expected.finish_reason or stream.finish_reasons[0]]:
            yield f"it ends with {stream.finish_reasons}, not {expected.finish_reason}"
        if num_tokens != {len(expected.token_ids)}:
            yield f"its usage is {stream.usages}, not {len(expected.token_ids)} tokens"
    elif state != "expired" or len(num_tokens) != 1:
        yield f"it ends as whole, with the usage {stream.usages}"
