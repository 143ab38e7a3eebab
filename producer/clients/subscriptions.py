"""Subscribes to the channels of all streams of one asyncio client, through one connection.

While any stream listens, a separate task, the keeper, owns the connection. The keeper puts each
message into the mailboxes of all streams that follow the message's channel. A stream that is not
busy handles the message immediately. After a lost connection, the keeper reconnects once for all
streams. From redis-py's PubSub, this module uses only the connection. PubSub itself reconnects in
the task that notices the loss, so one task cannot safely read while other tasks subscribe.
"""

from __future__ import annotations

import asyncio
import copy
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, cast

import redis

from promptq.producer.clients.resumable_stream import Notice, Wait
from promptq.shared.errors import QueueClosedError
from promptq.shared.runtime.tasks import end, heeding_cancels

MAX_UNREAD = 256
"""Most messages that wait for a stream. If one more arrives, `MISSED` replaces all of them."""

_MAX_RECONNECT_SECONDS = 0.1

_Heard = bytes | Notice | Exception
T = TypeVar("T")
GoOn = Callable[[Any], T | Wait]
"""Function that takes the answer to a stream's last action, and returns the next action."""

_Channel = tuple[bytes, bool]  # the name, and whether it is sharded

_MESSAGES = {b"message", b"smessage"}
_CONFIRMATIONS = {b"subscribe", b"ssubscribe"}
_ENDS = {b"unsubscribe", b"sunsubscribe"}
_SHARDED = {b"smessage", b"ssubscribe", b"sunsubscribe"}


class Subscriptions:
    """The subscriptions of one client: a connection, its reading task (the keeper), and the
    mailboxes that follow each channel."""

    def __init__(self, client: Any) -> None:
        self._redis = client
        self._mailboxes: dict[_Channel, list[Mailbox]] = {}
        self._requested: set[_Channel] = set()  # subscriptions that were sent, and not refused
        self._unanswered = deque[_Channel]()  # subscriptions without a reply, in the order sent
        self._leaving: Counter[_Channel] = Counter()  # unsubscriptions without a reply
        self._changed = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False
        self._is_quiet = False

    async def aclose(self) -> None:
        """Closes the connection. Streams that still listen raise QueueClosedError."""
        self._closed = True
        keeper = [] if self._keeper is None else [self._keeper]
        self._fail(QueueClosedError("the client was closed"))
        await end(keeper)

    def join(self, channel: _Channel, mailbox: Mailbox) -> None:
        """Puts new messages of a channel into a mailbox. Raises QueueClosedError after `aclose`.

        Messages that were sent before a `SUBSCRIBED` may be missing.
        """
        if self._closed:
            raise QueueClosedError("the client was closed")
        self._mailboxes.setdefault(channel, []).append(mailbox)
        if channel in self._requested:  # if the reply is still to come, it puts another one
            mailbox.put(Notice.SUBSCRIBED)
        self._changed.set()
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())

    async def leave(self, channel: _Channel, mailbox: Mailbox) -> None:
        """Ends a `join`. The last mailbox that leaves closes the connection."""
        mailboxes = self._mailboxes.get(channel, [])
        if mailbox not in mailboxes:
            return  # the connection failed before
        mailboxes.remove(mailbox)
        if not mailboxes:
            del self._mailboxes[channel]
            self._changed.set()
        if not self._mailboxes and self._keeper is not None:
            keeper, self._keeper = self._keeper, None
            self._requested.clear()
            await end([keeper])

    async def _keep(self) -> None:
        me = asyncio.current_task()
        assert me is not None
        try:
            async with aclosing(self._redis.pubsub(push_handler_func=_unlogged)) as pubsub:
                await pubsub.connect()
                while not me.cancelling():  # redis-py swallows cancellations, see `cancelling`
                    await self._listen(pubsub.connection, me)
                    await pubsub.connection.disconnect(nowait=True)
                    seconds = random.uniform(0, _MAX_RECONNECT_SECONDS)  # noqa: S311 # spreads them
                    await asyncio.sleep(seconds)
                    await pubsub.connect()
        except Exception as error:  # streams that listen must raise any error
            if self._keeper is me:
                self._fail(error)

    async def _listen(self, connection: Any, me: asyncio.Task[Any]) -> None:
        """Reads replies until the connection is lost. If no reply came before the loss, raises the
        connection's error."""
        self._requested.clear()
        self._unanswered.clear()
        self._leaving.clear()
        self._changed.set()
        self._is_quiet = heard_any = False
        beside = [
            asyncio.create_task(self._send_changes(connection)),
            asyncio.create_task(self._give_up_if_quiet(connection)),
        ]
        try:
            while not me.cancelling():
                try:
                    response = await connection.read_response(
                        timeout=math.inf, disconnect_on_error=False, push_request=True
                    )
                except redis.ResponseError as error:
                    self._refuse(error)
                else:
                    self._hear(response)
                self._is_quiet, heard_any = False, True
        except redis.ConnectionError:
            if not heard_any:
                raise
        finally:
            await end(beside)  # before the connection is opened again

    async def _send_changes(self, connection: Any) -> None:
        """Subscribes to new channels and unsubscribes from old ones, all in one write. Each channel
        has a separate command, so that an error is about one channel."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            new = sorted(self._mailboxes.keys() - self._requested)
            old = sorted(self._requested - self._mailboxes.keys())
            self._requested.difference_update(old)
            self._leaving.update(old)
            self._requested.update(new)
            self._unanswered.extend(new)
            commands = [("S" * sharded + "SUBSCRIBE", name) for name, sharded in new]
            commands += [("S" * sharded + "UNSUBSCRIBE", name) for name, sharded in old]
            await _send(connection, commands)

    async def _give_up_if_quiet(self, connection: Any) -> None:
        """Disconnects if the server sends nothing and does not answer a PING.

        Such a connection may be dead. The streams would not notice, as they also read the log.
        """
        seconds = connection.socket_timeout
        while seconds is not None and not self._is_quiet:
            self._is_quiet = True
            await asyncio.sleep(seconds)
            if self._is_quiet:
                await _send(connection, [("PING",)])
                await asyncio.sleep(seconds)
        if self._is_quiet:
            await connection.disconnect(nowait=True)

    def _hear(self, response: Any) -> None:
        if not isinstance(response, list) or len(response) != 3:
            return  # a push message that is not about channels
        kind, name, data = response
        channel = (name, kind in _SHARDED)
        if kind in _MESSAGES:
            self._put(channel, data)
        elif kind in _CONFIRMATIONS:
            self._unanswered.popleft()
            self._put(channel, Notice.SUBSCRIBED)
        elif kind in _ENDS:
            if self._leaving[channel]:
                self._leaving[channel] -= 1
            elif channel in self._requested:
                raise redis.ConnectionError("the cluster has moved the channel to another node")

    def _refuse(self, error: redis.ResponseError) -> None:
        """Passes the error to the oldest subscription without a reply, as replies come in order.

        If a stream still waits for a refused channel, the next `_send_changes` subscribes again.
        """
        if self._unanswered:
            channel = self._unanswered.popleft()
            self._requested.discard(channel)
            self._put(channel, error)

    def _put(self, channel: _Channel, item: _Heard) -> None:
        for mailbox in self._mailboxes.get(channel, ()):
            mailbox.put(item)

    def _fail(self, error: Exception) -> None:
        """Passes the error to all streams. The next stream starts a new keeper."""
        mailboxes, self._mailboxes = self._mailboxes, {}
        self._keeper = None
        self._requested.clear()
        for channel in mailboxes.values():
            for mailbox in channel:
                mailbox.put(error)


class Mailbox:
    """Messages that one stream has not handled yet. A full mailbox drops all its messages.

    A new mailbox follows no channel. The user of a mailbox must close the mailbox.
    """

    def __init__(self, subscriptions: Subscriptions) -> None:
        self._subscriptions = subscriptions
        self._loop = asyncio.get_running_loop()
        self._channel: _Channel | None = None
        self._unread: deque[_Heard] = deque()
        self._go_on: GoOn[Any]
        self._todo: asyncio.Future[Any] = self._loop.create_future()  # pending while a task listens
        self._todo.set_result(None)
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def subscribe(self, name: str, sharded: bool) -> None:
        """Follows this channel, and no other channel. `SUBSCRIBED` or an error arrives next."""
        await self.aclose()
        self._channel = (name.encode(), sharded)
        self._subscriptions.join(self._channel, self)

    async def listen(self, seconds: float, go_on: GoOn[T]) -> T:
        """Calls `go_on` with each message. Returns the first result of `go_on` that is no `Wait`.

        The task that reads the connection calls `go_on`, so the task that awaits `listen` wakes up
        only for the result. `go_on` gets an error if the connection is lost, and None if no message
        came within `seconds`.
        """
        while self._unread:
            todo = go_on(self._unread.popleft())
            if not isinstance(todo, Wait):
                return todo
            seconds = todo.seconds
        self._set_timer(seconds)
        self._go_on, self._todo = go_on, self._loop.create_future()
        result = await self._todo
        if isinstance(result, BaseException):
            raise result
        return cast(T, result)

    def put(self, item: _Heard) -> None:
        # Each stream raises its own copy: one shared error would collect all their tracebacks.
        own = copy.copy(item) if isinstance(item, Exception) else item
        if not self._todo.done():
            self._pass_on(own)
            return
        if len(self._unread) >= MAX_UNREAD:
            self._unread.clear()
            self._unread.append(Notice.MISSED)
        self._unread.append(own)

    async def aclose(self) -> None:
        """Stops following the channel."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await self._subscriptions.leave(channel, self)
        self._unread.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _pass_on(self, item: _Heard | None) -> None:
        try:
            todo = self._go_on(item)
        except (Exception, asyncio.CancelledError) as error:
            todo = error  # raised in the listening task, not here
        if isinstance(todo, Wait):
            self._set_timer(todo.seconds)
        elif not self._todo.done():  # `go_on` may have cancelled the listening task
            self._todo.set_result(todo)

    def _set_timer(self, seconds: float) -> None:
        """Sets the deadline. An earlier timer stays, and sets the next timer when it fires.

        Nearly all waits end before their deadlines. New timers would double the cost of a wait.
        """
        self._deadline = self._loop.time() + seconds
        if self._timer is not None:
            if self._timer.when() <= self._deadline:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadline, self._ring)

    def _ring(self) -> None:
        self._timer = None
        left = self._deadline - self._loop.time()
        if left > 0:
            self._set_timer(left)
        elif not self._todo.done():
            self._pass_on(None)


async def _send(connection: Any, commands: Sequence[tuple[str | bytes, ...]]) -> None:
    """Sends commands, unless the connection is lost: only the keeper may reconnect."""
    if commands and connection.is_connected:
        packed = connection.pack_commands(commands)
        await heeding_cancels(connection.send_packed_command(packed, check_health=False))


async def _unlogged(response: Any) -> Any:
    """Returns the response. redis-py's handler would also format it for a log that nobody reads."""
    return response
