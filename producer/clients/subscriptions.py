"""The channels that the streams of one asyncio client follow, through one connection.

A task of its own, the keeper, owns the connection for as long as anybody listens: it puts what
comes into the mailboxes of those who follow the channel, which hear it there and then unless they
are busy, and brings a lost connection back once for all of them. Of redis-py's PubSub only the
connection is used: PubSub connects again from whichever task finds the connection lost, so reading
in one and subscribing from others is not safe with it.
"""

from __future__ import annotations

import asyncio
import copy
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, cast

import redis

from promptq.producer.clients.stream import Missed, Subscribed, Wait
from promptq.shared.errors import QueueClosedError
from promptq.shared.runtime.tasks import end, heeding_cancels

MAX_UNREAD = 256
"""Of more messages that a stream does not take, it only hears that it missed some."""

_MAX_RECONNECT_SECONDS = 0.1

_Heard = bytes | Subscribed | Missed | Exception
T = TypeVar("T")
GoOn = Callable[[Any], T | Wait]
"""Told what came of the last action of a stream; gives the next."""

_Channel = tuple[bytes, bool]  # the name, and whether it is sharded

_MESSAGES = {b"message", b"smessage"}
_CONFIRMATIONS = {b"subscribe", b"ssubscribe"}
_ENDS = {b"unsubscribe", b"sunsubscribe"}
_SHARDED = {b"smessage", b"ssubscribe", b"sunsubscribe"}


class Subscriptions:
    """The connection, its keeper, and who follows which channel."""

    def __init__(self, client: Any) -> None:
        self._redis = client
        self._mailboxes: dict[_Channel, list[Mailbox]] = {}
        self._asked: dict[_Channel, None] = {}  # of the server, in this order
        self._confirmed: set[_Channel] = set()
        self._changed = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False
        self._is_quiet = False

    def mailbox(self) -> Mailbox:
        """One stream's mailbox. It follows nothing yet; whoever took it closes it."""
        return Mailbox(self)

    async def aclose(self) -> None:
        """Drop the connection; whoever still listens hears QueueClosedError."""
        self._closed = True
        keeper = [] if self._keeper is None else [self._keeper]
        self._fail(QueueClosedError("the client was closed"))
        await end(keeper)

    def join(self, channel: _Channel, mailbox: Mailbox) -> None:
        """Follow from the next `Subscribed` on. Raises QueueClosedError."""
        if self._closed:
            raise QueueClosedError("the client was closed")
        self._mailboxes.setdefault(channel, []).append(mailbox)
        if channel in self._confirmed:
            mailbox.put(Subscribed.SUBSCRIBED)
        self._changed.set()
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())

    async def leave(self, channel: _Channel, mailbox: Mailbox) -> None:
        """Follow no longer; the last to leave sees the connection closed."""
        mailboxes = self._mailboxes.get(channel, [])
        if mailbox not in mailboxes:
            return  # the connection failed before
        mailboxes.remove(mailbox)
        if not mailboxes:
            del self._mailboxes[channel]
            self._changed.set()
        if not self._mailboxes and self._keeper is not None:
            keeper, self._keeper = self._keeper, None
            self._confirmed.clear()
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
        except Exception as error:  # whatever it is, those who listen must not wait in vain
            if self._keeper is me:
                self._fail(error)

    async def _listen(self, connection: Any, me: asyncio.Task[Any]) -> None:
        """Hear what comes until the connection is lost; raises what it broke with if none came."""
        self._asked.clear()
        self._confirmed.clear()
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
            await end(beside)  # before the connection is another's

    async def _send_changes(self, connection: Any) -> None:
        """One command a channel, so that a refusal tells which; all there are in one write."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            new = list(self._mailboxes.keys() - self._asked.keys())
            old = list(self._asked.keys() - self._mailboxes.keys())
            for channel in old:
                del self._asked[channel]
            self._asked.update(dict.fromkeys(new))
            commands = [("SSUBSCRIBE" if sharded else "SUBSCRIBE", name) for name, sharded in new]
            commands += [
                ("SUNSUBSCRIBE" if sharded else "UNSUBSCRIBE", name) for name, sharded in old
            ]
            await _send(connection, commands)

    async def _give_up_if_quiet(self, connection: Any) -> None:
        """Disconnect when nothing comes, not even an answer: the link may stand and pass nothing.

        A lone stream would ask anew. Of several none knows: each finds in the log what it missed.
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
            return  # a push that is not about channels
        kind, name, data = response
        channel = (name, kind in _SHARDED)
        if kind in _MESSAGES:
            self._put(channel, data)
        elif kind in _CONFIRMATIONS:
            self._confirmed.add(channel)
            self._put(channel, Subscribed.SUBSCRIBED)
        elif kind in _ENDS:
            self._confirmed.discard(channel)

    def _refuse(self, error: redis.ResponseError) -> None:
        """Replies come in the order of commands: the error is that of the first without one."""
        for channel in self._asked:
            if channel not in self._confirmed:
                del self._asked[channel]
                self._put(channel, error)
                return

    def _put(self, channel: _Channel, item: _Heard) -> None:
        for mailbox in self._mailboxes.get(channel, ()):
            mailbox.put(item)

    def _fail(self, error: Exception) -> None:
        """Tell everybody; who comes next begins anew, with a connection and a keeper of its own."""
        mailboxes, self._mailboxes = self._mailboxes, {}
        self._keeper = None
        self._confirmed.clear()
        for channel in mailboxes.values():
            for mailbox in channel:
                mailbox.put(error)


class Mailbox:
    """What one stream has not heard yet. Nobody waits for it: what is too much is dropped."""

    def __init__(self, subscriptions: Subscriptions) -> None:
        self._subscriptions = subscriptions
        self._loop = asyncio.get_running_loop()
        self._channel: _Channel | None = None
        self._unread: deque[_Heard] = deque()
        self._go_on: GoOn[Any]
        self._todo: asyncio.Future[Any] = self._loop.create_future()  # open while one listens
        self._todo.set_result(None)
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def subscribe(self, name: str, sharded: bool) -> None:
        """Follow this channel instead of any before. Whether that succeeds is heard."""
        await self.aclose()
        self._channel = (name.encode(), sharded)
        self._subscriptions.join(self._channel, self)

    async def listen(self, seconds: float, go_on: GoOn[T]) -> T:
        """Tell `go_on` what comes for as long as it gives a `Wait`; returns what else it gives.

        It is told where a message is read: the task that listens takes no turn until the end. An
        error tells of a lost connection, None that nothing came within the seconds of the wait.
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
        # Each stream raises an error of its own: a shared one would collect their tracebacks.
        own = copy.copy(item) if isinstance(item, Exception) else item
        if not self._todo.done():
            self._tell(own)
            return
        if len(self._unread) >= MAX_UNREAD:
            self._unread.clear()
            self._unread.append(Missed.MISSED)
        self._unread.append(own)

    async def aclose(self) -> None:
        """Follow nothing any more."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await self._subscriptions.leave(channel, self)
        self._unread.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self, item: _Heard | None) -> None:
        try:
            todo = self._go_on(item)
        except (Exception, asyncio.CancelledError) as error:
            todo = error  # for who listens; whoever brought the item goes on
        if isinstance(todo, Wait):
            self._set_timer(todo.seconds)
        elif not self._todo.done():  # it may have cancelled who listens
            self._todo.set_result(todo)

    def _set_timer(self, seconds: float) -> None:
        """A timer that would ring before is left to ring, and then set to what is left.

        Nearly every wait ends long before its time, and a timer each would double what it costs.
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
            self._tell(None)


async def _send(connection: Any, commands: Sequence[tuple[str | bytes, ...]]) -> None:
    """Not on a lost connection: redis-py would open it anew, beside the keeper, who does that."""
    if commands and connection.is_connected:
        packed = connection.pack_commands(commands)
        await heeding_cancels(connection.send_packed_command(packed, check_health=False))


async def _unlogged(response: Any) -> Any:
    """In the place of redis-py's handler, which writes each message out for a log nobody reads."""
    return response
