"""Prints a stream on standard output, for `promptq submit` and `promptq watch`."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from redis.exceptions import RedisError
from rich.text import Text

from promptq.producer.admin.request_fields import json_object
from promptq.producer.clients.resumable_stream import GIVE_UP_SECONDS
from promptq.producer.clients.sync_client import Client
from promptq.producer.commands.screens.render import milliseconds, tokens
from promptq.producer.commands.screens.terminal import SafeConsole
from promptq.shared.errors import PromptqError, RedisUnavailableError
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.request import FinishReason
from promptq.shared.queue import lookups
from promptq.shared.runtime.printable import one_line, printable, write

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
_CANCEL_SECONDS = 5.0
_SILENT_SECONDS = 3.0


class StreamPrinter:
    """Prints one stream as its events arrive, and reports its end on standard error."""

    def __init__(self, client: Client, request_id: str, as_json: bool) -> None:
        self._client = client
        self._id = request_id
        self._as_json = as_json
        self._console = SafeConsole(stderr=True, highlight=False)
        self._is_interrupted = False
        self._in_front = math.inf  # requests in front of this one, as last printed
        self._enqueued_at: float | None = None  # None if another process enqueued it
        self._first_token_ms: float | None = None
        self._ends_in_newline = True

    def submit(self) -> int:
        """Prints the stream. Ctrl-C or a closed pipe cancels the request. Returns the exit code."""
        self._enqueued_at = time.monotonic()
        with self._cancelling_on_ctrl_c():
            try:
                last = self._follow()
            except KeyboardInterrupt:
                self._end_line()
                self._say(f"the cancel of {self._id} is requested; no worker has answered yet")
                return EXIT_INTERRUPTED
            except BrokenPipeError:
                self._client.cancel(self._id)
                return _leave_pipe()
        if self._is_interrupted:
            self._say(f"{last.finish_reason} after {tokens(last.end)}")
            return EXIT_INTERRUPTED
        return self._report_end(last)

    def watch(self) -> int:
        """Prints the stream to its end. Ctrl-C only stops printing. Returns the exit code."""
        try:
            return self._report_end(self._follow())
        except KeyboardInterrupt:
            self._end_line()
            return EXIT_INTERRUPTED
        except BrokenPipeError:
            return _leave_pipe()

    def _follow(self) -> TokenEvent:
        last = None
        with self._explaining_silence() as heard:
            self._print_prompt()
            for event in self._client.stream(self._id):
                heard()
                self._print(event)
                last = event
        assert last is not None, "a stream ends with its last event"
        self._end_line()
        return last

    def _print_prompt(self) -> None:
        """At a terminal, prints the prompt that the model continues."""
        if self._as_json or not sys.stdout.isatty():
            return
        queue, prompt = self._client.queue, None
        with suppress(PromptqError, RedisError):  # the stream reports the error
            prompt = json_object(queue.run(lookups.payload(queue.keys, self._id))).get("prompt")
        if isinstance(prompt, str):
            shown = Text(printable(prompt, keep="\n\t"), "dim")
            SafeConsole(highlight=False).print(shown, end="", soft_wrap=True)
            self._ends_in_newline = not prompt or prompt.endswith("\n")

    def _print(self, event: TokenEvent) -> None:
        if event.token_ids and self._first_token_ms is None and self._enqueued_at is not None:
            self._first_token_ms = (time.monotonic() - self._enqueued_at) * 1000
        if self._as_json:
            write(one_line(event.to_json()))
        elif event.text:
            self._ends_in_newline = event.text.endswith("\n")
            write(event.text, end="")

    def _end_line(self) -> None:
        if not self._ends_in_newline:
            write("")
            self._ends_in_newline = True

    @contextmanager
    def _explaining_silence(self) -> Iterator[Callable[[], None]]:
        """At a terminal, says why no event comes. Call the yielded function at each event."""
        num_heard, is_over = 0, threading.Event()

        def heard() -> None:
            nonlocal num_heard
            num_heard += 1

        def look() -> None:
            num_before, printed = 0, ""
            while not is_over.wait(_SILENT_SECONDS):
                if num_heard > num_before:
                    num_before, printed = num_heard, ""
                    continue
                why = self._why_silent(has_begun=num_heard > 0)
                if why not in ("", printed) and not is_over.is_set():
                    printed = why
                    if sys.stdout.isatty():
                        self._end_line()
                    self._say(why)

        if self._console.is_terminal:
            threading.Thread(target=look, daemon=True).start()
        try:
            yield heard
        finally:
            is_over.set()

    def _why_silent(self, *, has_begun: bool) -> str:
        """Returns why no event comes, according to the queue; empty if unknown."""
        try:
            stats = self._client.stats()
        except RedisUnavailableError:
            return f"the server does not answer; trying again for {GIVE_UP_SECONDS:.0f} s"
        except PromptqError:  # the stream reports the server's error
            return ""
        # Running requests continue while the queue is paused.
        why = stats.why_no_worker if has_begun else stats.why_waiting()
        if why or has_begun:
            return f"the request waits: {why}" if why else ""
        return self._place()

    def _place(self) -> str:
        """Returns the place of a request that waits; empty if the place is no better than the last
        one that was returned. A long wait prints a line whenever half of the requests have gone."""
        try:
            place = self._client.place(self._id)
        except (PromptqError, RedisError):  # also if the user may not read places
            return ""
        last = self._in_front
        if place.in_front is None or place.in_front >= last or 2 * place.in_front > last:
            return ""
        self._in_front = place.in_front
        return f"the request is {place}"

    @contextmanager
    def _cancelling_on_ctrl_c(self) -> Iterator[None]:
        """Context manager in which the first Ctrl-C cancels the request. Then the stream's last
        event comes.

        Raises KeyboardInterrupt at the second Ctrl-C, or if this event does not come within
        `_CANCEL_SECONDS`.
        """
        main_thread = threading.get_ident()
        give_up = threading.Timer(
            _CANCEL_SECONDS, lambda: signal.pthread_kill(main_thread, signal.SIGINT)
        )
        give_up.daemon = True

        def cancel() -> None:
            with suppress(PromptqError):  # the stream reports the server's error
                self._client.cancel(self._id)

        def on_interrupt(_number: int, _frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._is_interrupted = True
            threading.Thread(target=cancel, daemon=True).start()
            give_up.start()

        before = signal.signal(signal.SIGINT, on_interrupt)
        try:
            yield
        finally:
            give_up.cancel()
            signal.signal(signal.SIGINT, before)

    def _report_end(self, last: TokenEvent) -> int:
        if last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            if self._console.is_terminal:
                self._console.print(self._summary(last), style="dim")
            return 0
        if last.error is not None:
            self._say(f"request {self._id} failed: {last.error.message} ({last.error.type})")
        else:
            was = "was " if last.finish_reason is FinishReason.CANCELLED else ""
            self._say(f"request {self._id} {was}{last.finish_reason} after {tokens(last.end)}")
        return 1

    def _summary(self, last: TokenEvent) -> str:
        parts = [str(last.finish_reason), tokens(last.end)]
        if last.stats is not None and last.stats.tokens_per_second:
            parts.append(f"{last.stats.tokens_per_second:,.0f} tokens/s")
        if self._first_token_ms is not None:
            parts.append(f"first token after {milliseconds(self._first_token_ms)}")
        return " · ".join(parts)

    def _say(self, message: str) -> None:
        self._console.print(Text(f"promptq: {message}"), soft_wrap=True)


def _leave_pipe() -> int:
    """Prevents Python's error message about the closed pipe at exit. Returns the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_BROKEN_PIPE
