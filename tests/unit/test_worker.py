"""The worker thread of a process group: order and errors, without MPI."""

import threading

import pytest
import torch

from kaitian_mpi.distributed.collectives.arrivals import describe_timeout
from kaitian_mpi.distributed.collectives.staging import SideStreams
from kaitian_mpi.distributed.collectives.worker import Worker
from kaitian_mpi.errors import CollectiveError, RankLostError, UnsupportedError

# torch's own note about a future whose callback failed.
pytestmark = pytest.mark.filterwarnings("ignore")


class Queue:
    """A worker that records what it runs, and waits until `gate` is set."""

    def __init__(self):
        self.worker = Worker("test", SideStreams())
        self.order = []
        self.gate = threading.Event()
        self.held = self.give("held", lambda: self.gate.wait(10))

    def give(self, name, method=lambda: None, in_background=True):
        def carry_out():
            method()
            self.order.append(name)

        return self.worker.run(name, carry_out, [torch.ones(1)], in_background)

    def let_go(self):
        self.gate.set()
        self.worker.close()
        return self.order


@pytest.fixture
def queue():
    made = Queue()
    yield made
    made.let_go()


@pytest.mark.parametrize("how", ["wait", "future"])
def test_a_callback_may_wait_for_work_queued_after_it(queue, how):
    late = []

    def wait(_):
        (late[0] if how == "wait" else late[0].get_future()).wait()
        queue.give("asked")

    waited = queue.held.get_future().then(wait)
    late.append(queue.give("late"))
    queue.give("later")
    assert queue.let_go() == ["held", "late", "asked", "later"]
    waited.wait()


def test_a_callback_that_waits_for_itself_gets_an_error(queue):
    futures = []
    futures.append(queue.held.get_future().then(lambda _: futures[0].wait()))
    queue.let_go()
    with pytest.raises(RuntimeError, match="callback waits for itself"):
        futures[0].wait()


def test_work_submitted_by_a_native_callback_is_queued(queue):
    """Such as a callback of `torch.futures.collect_all`, which ignores the order."""
    asked = []
    queue.give("before")
    both = torch.futures.collect_all([queue.held.get_future()])
    both.then(lambda _: asked.append(queue.give("asked", in_background=False).wait()))
    queue.give("after")
    assert queue.let_go() == ["held", "before", "after", "asked"]
    assert asked == [True]


def fail(error):
    raise error


def test_an_error_is_raised_where_it_is_waited_for_and_else_logged_at_the_end(capfd):
    queue = Queue()
    failed = queue.give("failed", lambda: fail(OSError("planted")))
    seen = failed.get_future().then(lambda future: future.value())
    late = queue.give("next")
    queue.let_go()
    for waiting in (failed, failed.get_future(), seen, seen.then(lambda future: future.wait())):
        with pytest.raises((OSError, RuntimeError), match="planted"):
            waiting.wait()
    assert isinstance(failed.exception(), OSError)
    assert (failed.is_completed(), failed.is_success()) == (True, False)
    with pytest.raises(CollectiveError, match=r"next: .* failed before: failed: OSError: planted"):
        late.wait()
    assert "no caller waited" not in capfd.readouterr().err
    queue = Queue()
    refused = queue.give("refused", lambda: fail(UnsupportedError("not that")))
    good = queue.give("good")  # a rejected call leaves the group usable
    queue.let_go()
    assert "a collective failed, and no caller waited for it: not that" in capfd.readouterr().err
    with pytest.raises(UnsupportedError, match="not that"):
        refused.wait()
    assert good.wait()


def test_recorded_losses_do_not_fail_a_future(queue):
    queue.worker.records_losses = True
    watched = queue.give("watched", lambda: fail(RankLostError("gone")))
    unwatched = queue.give("unwatched")
    assert not watched.get_future().done()
    queue.let_go()
    watched.get_future().wait()
    assert isinstance(queue.worker.broken, RankLostError)
    with pytest.raises(RankLostError):
        unwatched.wait()


def test_a_timeout_names_the_late_ranks_or_who_is_in_which_collective():
    together = {"0": b"3 all_reduce", "2": b"3 barrier", "1": b"3 all_reduce"}
    different = (
        "timed out after 5 s: the ranks called different collectives (all_reduce on ranks 0, 1, "
        "barrier on rank 2); call the same ones in the same order on every rank"
    )
    assert describe_timeout(5, 3, together, 3) == different
    for arrived in (together | {"2": b"2 barrier"}, {"0": b"3 all_reduce", "1": b"3 all_reduce"}):
        assert "{operation} #3: waiting for rank 2 of 3" in describe_timeout(5, 3, arrived, 3)


def test_each_collective_is_announced_by_its_name():
    begun = []
    worker = Worker("test", SideStreams(), begun.append)
    for in_background in (False, True):
        worker.run("all_reduce", lambda: None, [], in_background).wait()
    worker.close()
    assert begun == ["all_reduce", "all_reduce"]
