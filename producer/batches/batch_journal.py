"""The output file and the error file of a batch. They also record which input lines are done.

Each line of these files is written when the request of an input line has ended. The field `id`
contains the number of the input line. After a crash, the two files show which input lines need not
run again. No second record exists that could differ.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Self

from promptq.producer.batch_store.input_file import RefusedLineError
from promptq.shared.errors import PromptqError
from promptq.shared.protocol.events import Usage
from promptq.shared.runtime.printable import one_line

_LINE_ID = re.compile(rb'\{"id":"batch_req_[^"]*?_(\d+)"')


class BatchIsRunningError(PromptqError):
    """Another process writes the files of this batch."""


class Journal:
    """Appends answers to a batch's output file, and errors to its error file.

    The constructor locks both files, and cuts off incomplete last lines. Raises BatchIsRunningError
    if another process has locked a file.
    """

    def __init__(self, batch_id: str, output: Path, errors: Path) -> None:
        self._batch_id = batch_id
        self._output = _open_locked(output)
        try:
            self._errors = _open_locked(errors)
        except BaseException:
            self._output.close()
            raise
        self.usage = Usage()
        """Token counts of all answers together."""
        completed = _numbers_in(self._output, self._count_usage)
        failed = _numbers_in(self._errors)
        self.done = completed | failed
        """The numbers of the input lines that are done."""
        self.num_completed = len(completed)
        self.num_failed = len(failed)

    def add_answer(
        self, number: int, custom_id: str, request_id: str, body: dict[str, Any]
    ) -> None:
        """Writes the answer of a request."""
        response = {"status_code": 200, "request_id": request_id, "body": body}
        self._write(self._output, number, custom_id, response, None)
        self.num_completed += 1
        self._count_usage(body)

    def add_refusal(self, refused: RefusedLineError) -> None:
        """Writes the error of a line that the gateway would refuse."""
        response = {
            "status_code": refused.status,
            "request_id": refused.request_id,
            "body": refused.body,
        }
        line = refused.line
        self._write(self._errors, line.number, line.custom_id, response, None)
        self.num_failed += 1

    def add_error(self, number: int, custom_id: str | None, code: str, message: str) -> None:
        """Writes the error of a line that did not run, or did not finish."""
        error = {"code": code, "message": message}
        self._write(self._errors, number, custom_id, None, error)
        self.num_failed += 1

    def flush(self) -> None:
        """Passes all lines to the operating system: they survive the death of the process."""
        self._output.flush()
        self._errors.flush()

    def sync(self) -> None:
        """Writes all lines to the disk: after this, they survive a power cut."""
        self.flush()
        os.fsync(self._output.fileno())
        os.fsync(self._errors.fileno())

    def close(self) -> None:
        """Writes all lines to the disk, and unlocks the files."""
        self.sync()
        self._output.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _count_usage(self, body: dict[str, Any]) -> None:
        own, total = body["usage"], self.usage
        details = own.get("completion_tokens_details", {})
        self.usage = Usage(
            prompt_tokens=total.prompt_tokens + own["prompt_tokens"],
            completion_tokens=total.completion_tokens + own.get("completion_tokens", 0),
            cached_tokens=total.cached_tokens
            + own.get("prompt_tokens_details", {}).get("cached_tokens", 0),
            reasoning_tokens=(total.reasoning_tokens or 0) + details.get("reasoning_tokens", 0),
        )

    def _write(
        self,
        file: BinaryIO,
        number: int,
        custom_id: str | None,
        response: dict[str, Any] | None,
        error: dict[str, Any] | None,
    ) -> None:
        line = {
            "id": f"batch_req_{self._batch_id.removeprefix('batch_')}_{number}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":"))
        file.write(one_line(text).encode("utf-8", "replace") + b"\n")
        self.done.add(number)


def _open_locked(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    file = path.open("r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise BatchIsRunningError(f"another process is writing {path}") from None
    return file


def _numbers_in(
    file: BinaryIO, on_body: Callable[[dict[str, Any]], object] | None = None
) -> set[int]:
    """Returns numbers of input lines in a file's complete lines. Cuts off an incomplete last line.

    Calls `on_body` with the body of each answer.
    """
    numbers, num_bytes = set(), 0
    for line in file:
        match = _LINE_ID.match(line)
        if not line.endswith(b"\n") or match is None:
            break
        if on_body is not None:
            on_body(json.loads(line)["response"]["body"])
        numbers.add(int(match[1]))
        num_bytes += len(line)
    file.seek(num_bytes)
    file.truncate()
    return numbers
