"""Follows pending messages to their ends in a thread, and gives up those that will not end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from kaitian_mpi.distributed.messages import Message
from kaitian_mpi.errors import CollectiveError, RankLostError
from kaitian_mpi.mpi.host_collectives import ANY_SOURCE
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.abort import abort_with_traceback
from kaitian_mpi.runtime.polling import keep_alive, nap
from kaitian_mpi.runtime.system import ThreadMaker

if TYPE_CHECKING:
    from kaitian_mpi.distributed.collectives.arrivals import ArrivalTracker

_CLOSE_SEC = 5.0  # how long the end of the group waits for messages that are on their way
_LEFT_INTERVAL_SEC = 1.0  # between two checks of which ranks have left the group


class MessageThread:
    """Follows the pending messages of one rank of a group."""

    def __init__(
        self,
        size: int,
        name: str,
        arrivals: ArrivalTracker,
        timeout: timedelta,
        on_failure: Callable[[CollectiveError], None],
        make_thread: ThreadMaker,
    ) -> None:
        """Start the thread. Not collective.

        `size` is the group's. `on_failure` is called with the error after which the group cannot be
        used.
        """
        self._size = size
        self._arrivals = arrivals
        self._on_failure = on_failure
        self.set_timeout(timeout)
        self._pending: list[Message] = []
        self._changed = threading.Condition()
        self._closed_at = float("inf")
        self._is_closing = False
        self._left_checked_at = float("-inf")
        self._thread = make_thread(self._poll_or_abort, name)
        self._thread.start()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of messages, including pending ones. Not collective."""
        self._timeout_sec = timeout.total_seconds()

    def follow(self, message: Message) -> Message:
        """Follow a message to its end; start it at once, if it may."""
        with self._changed:
            try:
                _start_after(self._pending, message)
            except Exception as error:
                if not ulfm.may_be_loss(error):
                    raise
                # The thread meets it as well, and then fails all messages.
            self._pending.append(message)
            self._changed.notify()
        return message

    def close(self) -> bool:
        """End the thread, and fail pending messages; return whether there were none."""
        with self._changed:
            self._closed_at = time.perf_counter()
            self._changed.notify()
        self._thread.join()
        for message in self._pending:
            keep_alive(*message.in_use())
            self._fail_at_end(message)
        return not self._pending

    def _poll_or_abort(self) -> None:
        try:
            self._poll()
        except BaseException:  # without this thread, other ranks would wait for its messages
            abort_with_traceback("messages failed:\n")

    def _poll(self) -> None:
        """Take messages further, sleeping in between, until closed."""
        idle_since = time.perf_counter()
        while True:
            with self._changed:
                while not self._pending and self._closed_at == float("inf"):
                    self._changed.wait()
                    idle_since = time.perf_counter()
                is_over = not self._pending
            if is_over or time.perf_counter() - self._closed_at > _CLOSE_SEC:
                return
            if self._advance():
                idle_since = time.perf_counter()
            else:
                nap(time.perf_counter() - idle_since)

    def _advance(self) -> bool:
        """Take the pending messages as far as they come now; return whether one came further.

        In a method of its own, as variables of a thread that sleeps would keep the last tensors.
        """
        now = time.perf_counter()
        try:
            with self._changed:  # `follow` starts no message before those that wait
                waiting = list(self._pending)
                _start_in_order(waiting)
            if now >= self._closed_at:
                self._cancel_receives(waiting)
            moved = sum(message.moved for message in waiting)
            done = [message for message in waiting if message.is_transferred()]
            if not (done or self._is_closing):
                self._fail_overdue(waiting, now)
        except Exception as error:
            if not ulfm.may_be_loss(error):
                raise
            self._fail_all(error)
            return True
        if done:
            self._finish(done)
        return bool(done) or sum(message.moved for message in waiting) > moved

    def _cancel_receives(self, waiting: Sequence[Message]) -> None:
        """Cancel, once, those that no message has matched when the group ends."""
        if not self._is_closing:
            self._is_closing = True
            for message in waiting:
                if message.is_receive and not message.moved:
                    message.cancel()

    def _finish(self, done: Sequence[Message]) -> None:
        with self._changed:
            self._pending = [message for message in self._pending if message not in done]
        for message in done:
            if message.is_canceled:
                self._fail_at_end(message)
            elif message.fault:
                self._fail_group(message, f"{message.describe(self._size)}: {message.fault}")
            else:
                message.finish()

    def _fail_at_end(self, message: Message) -> None:
        awaited = message.describe(self._size)
        message.fail(CollectiveError(f"the group ended while waiting for {awaited}"))

    def _fail_all(self, error: Exception) -> None:
        """Fail all messages because a rank was lost; the other ranks learn of it, too."""
        ulfm.revoke_all()
        lost = RankLostError(f"a message: a rank is lost ({error})")
        with self._changed:
            messages = self._pending
            self._pending = []
        self._on_failure(lost)
        for message in messages:
            keep_alive(*message.in_use())
            message.fail(lost)

    def _fail_overdue(self, waiting: Sequence[Message], now: float) -> None:
        """Fail a message that has timed out, or whose other rank has left the group.

        At most one, as it fails the group.
        """
        for message in waiting:
            if now - message.awaited_since > self._timeout_sec:
                timed_out = f"timed out after {self._timeout_sec:g} s in {message.name}"
                self._fail(message, f"{timed_out}: waiting for {message.describe(self._size)}")
                return
        overdue = [
            message for message in waiting if now - message.awaited_since > _LEFT_INTERVAL_SEC
        ]
        if overdue and now - self._left_checked_at >= _LEFT_INTERVAL_SEC:
            self._left_checked_at = now
            self._fail_abandoned(waiting, overdue)

    def _fail_abandoned(self, waiting: Sequence[Message], overdue: Sequence[Message]) -> None:
        """Fail the first of the overdue messages whose other rank has left the group."""

        def is_needed() -> bool:
            # Whether this thread has something else to do than to wait for the store.
            is_changed = len(self._pending) > len(waiting) or self._closed_at < float("inf")
            with self._changed:
                _start_in_order(waiting)
            return is_changed or any(message.is_transferred() for message in waiting)

        try:
            left = self._arrivals.ranks_left(until=is_needed)
        except RankLostError:  # a thread that waits in MPI gets the error there
            return
        have_all_left = len(left) >= self._size - 1
        for message in overdue:
            has_left = have_all_left if message.peer == ANY_SOURCE else message.peer in left
            # Only at the second check: what the rank sent before leaving has arrived by then.
            if has_left and message.peer_left:
                self._fail(message, message.describe_abandoned(self._size))
                return
            message.set_peer_left(has_left)

    def _fail(self, message: Message, text: str) -> None:
        """Fail a message and the group, unless the message arrives at this moment."""
        if message.is_receive:
            message.cancel()
            if not message.is_transferred():
                return  # it is arriving
            if not message.is_canceled:
                self._finish([message])
                return
        else:
            keep_alive(*message.in_use())
        with self._changed:
            self._pending.remove(message)
        self._fail_group(message, text)

    def _fail_group(self, message: Message, text: str) -> None:
        """Fail a message, and with it the group."""
        error = CollectiveError(text)
        self._on_failure(error)
        message.fail(error)


def _start_in_order(messages: Sequence[Message]) -> None:
    """Give MPI those messages that may start now, in order."""
    before: list[Message] = []
    for message in messages:
        if message.is_waiting_to_start:
            _start_after(before, message)
            before.append(message)


def _start_after(before: Sequence[Message], message: Message) -> None:
    """Start a message, unless one of those `before` it must start first."""
    if not any(other.holds_back(message) for other in before):
        message.start({other.peer for other in before if other.precedes(message)})
