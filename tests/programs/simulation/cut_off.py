"""Checks the parts of streams that killed clients had read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tests.programs.chaos.audit.auditor import Violation, check_stream
from tests.programs.chaos.audit.records import Sent
from tests.programs.simulation.auditor import Stream


def check_cut_off(sent: Iterable[Sent], streams: Iterable[Stream]) -> Iterator[Violation]:
    """Yields a violation for each read part that is not the beginning of the answer, without gap or
    repeat."""
    requests = {request.request_id: request for request in sent}
    for stream in streams:
        if not stream.is_cut_off:
            continue
        seen = stream.seen
        for violation in check_stream(seen):
            if violation.rule != "last event":
                yield violation
        expected = requests[seen.request_id].expected({})
        if not expected.text.startswith(seen.text):
            what = f"{seen.subscriber}: {seen.text[-40:]!r}"
            yield Violation("changed text", seen.request_id, what)
