"""The thread that follows pending messages: order, ends and errors, without MPI."""

import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch

from kaitian_mpi.distributed import message_thread
from kaitian_mpi.distributed.message_thread import MessageThread
from kaitian_mpi.distributed.messages import Message
from kaitian_mpi.errors import CollectiveError, RankLostError
from kaitian_mpi.mpi.host_collectives import ANY_SOURCE
from kaitian_mpi.runtime import ulfm

SIZE = 3
LONG_SEC = 60.0


class FakeMessage(Message):
    """A message that a test lets start, and lets arrive."""

    def __init__(self, name, peer=1, tag=0, *, is_receive=True, may_start=True, error=None):
        super().__init__(torch.zeros(1), peer, tag, is_receive=is_receive)
        self.may_start = may_start
        self.error = error
        self.started_with = None
        self.has_arrived = threading.Event()

    @property
    def is_waiting_to_start(self):
        return self.started_with is None

    def start(self, reserved):
        if self.error is not None:
            raise self.error
        if self.may_start and self.started_with is None:
            self.started_with = set(reserved)

    def is_transferred(self):
        return self.is_canceled or (self.started_with is not None and self.has_arrived.is_set())

    def cancel(self):
        self.is_canceled = not self.has_arrived.is_set()

    def in_use(self):
        return []


class Ranks:
    """Which ranks have left the group."""

    def __init__(self):
        self.left = set()

    def ranks_left(self, until):
        return self.left


class Group:
    def __init__(self, timeout_sec):
        self.ranks, self.failures = Ranks(), []
        make_thread = partial(threading.Thread, daemon=True)
        self.is_closed = False
        self.thread = MessageThread(
            *(SIZE, "test", self.ranks, timedelta(seconds=timeout_sec), self.failures.append),
            lambda work, name: make_thread(target=work, name=name),
        )

    def follow(self, *names_and_peers, **how):
        message = FakeMessage(*names_and_peers, **how)
        return self.thread.follow(message)

    def close(self):
        self.is_closed = True
        return self.thread.close()

    def error_of(self, message):
        with pytest.raises(CollectiveError) as raised:
            message.wait()
        return str(raised.value)


@pytest.fixture
def make_group():
    groups = []

    def make(timeout_sec=LONG_SEC):
        groups.append(Group(timeout_sec))
        return groups[-1]

    yield make
    for group in groups:
        if not group.is_closed:
            group.close()


def test_messages_end_in_the_order_in_which_they_arrive(make_group):
    group = make_group()
    first, second = group.follow("first"), group.follow("second")
    second.has_arrived.set()
    assert second.wait()
    assert not first.is_completed()
    first.has_arrived.set()
    assert first.wait()
    assert group.close()


def test_a_message_starts_after_those_that_it_could_be_taken_for(make_group):
    group = make_group()
    first = group.follow("first", may_start=False)
    same_tag = group.follow("same tag")
    other_tag = group.follow("other tag", 1, 7)
    sent = group.follow("sent", is_receive=False)
    from_any = group.follow("from any", ANY_SOURCE)
    assert same_tag.is_waiting_to_start
    assert (other_tag.started_with, sent.started_with) == (set(), set())
    assert from_any.started_with == {1}  # whose next message is the first's
    first.may_start = True
    for message in (first, same_tag, other_tag, sent, from_any):
        message.has_arrived.set()
        assert message.wait()


def test_a_timeout_begins_with_the_wait_and_fails_the_group(make_group):
    group = make_group(timeout_sec=0.2)
    message = group.follow("never")
    time.sleep(0.4)
    assert not group.failures
    told = "timed out after 0.2 s in recv: waiting for a message from rank 1 of 3"
    assert group.error_of(message) == told
    assert [str(error) for error in group.failures] == [told]


@pytest.mark.parametrize(
    ("peer", "left", "is_receive", "told"),
    [
        (2, {2}, True, "recv: rank 2 of 3 ended the group without sending the message; check"),
        (2, {2}, False, "send: rank 2 of 3 ended the group without receiving the message; check"),
        (ANY_SOURCE, {1, 2}, True, "recv: all other ranks have ended the group, so no message"),
    ],
)
def test_a_message_of_a_rank_that_has_left_fails_at_the_second_look(
    make_group, monkeypatch, peer, left, is_receive, told
):
    monkeypatch.setattr(message_thread, "_LEFT_INTERVAL_SEC", 0.05)
    group = make_group()
    group.ranks.left = left
    other = group.follow("other", 0)
    message = group.follow("left", peer, is_receive=is_receive)
    assert group.error_of(message).startswith(told)
    assert message.peer_left
    assert not other.is_completed()


def test_a_message_that_cannot_start_as_a_rank_is_lost_fails_where_it_is_waited_for(
    make_group, monkeypatch
):
    """Another thread has met the loss, and has revoked what messages are sent by."""
    monkeypatch.setattr(ulfm, "may_be_loss", lambda error: isinstance(error, OSError))
    group = make_group()
    pending = group.follow("pending")
    cut_off = group.follow("cut off", is_receive=False, error=OSError("revoked"))
    for message in (pending, cut_off):
        assert group.error_of(message) == "a message: a rank is lost (revoked)"
    assert [type(error) for error in group.failures] == [RankLostError]


def test_what_arrives_while_the_group_ends_is_received_and_the_rest_canceled(make_group):
    group = make_group()
    arrived = group.follow("arrived")
    never = group.follow("never")
    arrived.has_arrived.set()
    assert group.close()
    assert arrived.wait()
    told = "the group ended while waiting for a message from rank 1 of 3"
    assert group.error_of(never) == told


def test_a_send_in_flight_at_the_end_is_waited_for_and_then_fails(make_group, monkeypatch):
    monkeypatch.setattr(message_thread, "_CLOSE_SEC", 0.1)
    group = make_group()
    sent = group.follow("sent", is_receive=False)
    assert not group.close()
    assert group.error_of(sent) == "the group ended while waiting for rank 1 of 3 to receive"
