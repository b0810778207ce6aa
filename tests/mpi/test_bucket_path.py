"""The way of a gradient bucket from backward to MPI: through few files, and never back up."""

import functools
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from samples import linear_task
from torch.nn.parallel import DistributedDataParallel
from unit.test_layers import FLOORS, modules, package_imports, room

import kaitian_mpi
from kaitian_mpi import Training
from kaitian_mpi.distributed.collectives.worker import Worker
from kaitian_mpi.distributed.data_parallel import WeightedSum
from kaitian_mpi.distributed.reducer import GradientReducer
from kaitian_mpi.mpi import datatypes

ROOT = Path(kaitian_mpi.__file__).parent
MAX_FILES = 8
MAX_FILES_OF_A_STEP = 35
# Where a thread is done with a bucket: it is in the queue, or becomes a buffer of MPI's.
HANDED_OVER = (Worker._put.__code__, datatypes.as_buffer.__code__)


class Trace:
    """A profile function that notes the package's calls, in each thread until it hands over."""

    def __init__(self):
        self.is_on = False
        self.calls = set()
        """Pairs of modules: the caller's, and that of what it calls."""
        self.passed = []
        """The modules of the functions that have the bucket and pass it on, in order."""
        self.done = []
        """The threads that have handed it over."""

    def stop(self):
        self.is_on = False
        sys.setprofile(None)
        threading.setprofile(None)

    def __call__(self, frame, event, _):
        thread = threading.get_ident()
        if not self.is_on or event != "call" or thread in self.done or not module_of(frame):
            return
        callers = []
        outer = frame.f_back
        while outer is not None:
            callers += [module_of(outer)] if module_of(outer) else []
            outer = outer.f_back
        if callers:
            self.calls.add((callers[0], module_of(frame)))
        if frame.f_code in HANDED_OVER:
            self.done.append(thread)
            self.passed = list(dict.fromkeys([*self.passed, *reversed(callers)]))


def module_of(frame):
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT):
        return ""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@functools.cache
def imported_by(module):
    """Return all modules that one imports, and that those import, and so on."""
    direct = package_imports(modules()[module]) & modules().keys() - {module}
    return direct.union(*map(imported_by, direct))


@pytest.fixture
def trace():
    seen = Trace()
    threading.setprofile(seen)  # for the thread of a group that is made from now on
    sys.setprofile(seen)
    yield seen
    seen.stop()


def by_hook(group, length):
    """Return a backward that sums a script's gradients: in DDP's communication hook."""
    model = DistributedDataParallel(torch.nn.Linear(length, 1), process_group=group)
    WeightedSum(group).attach(model)
    loss = model(torch.ones(1, length)).sum()
    return lambda model=model: loss.backward()  # until which the model must live


def by_reducer(group, length):
    """Return a backward that sums a Training's gradients: in several buckets."""
    model = torch.nn.Linear(length, 2)
    reducer = GradientReducer(model, group=group, bucket_caps=(1, 1))
    loss = model(torch.ones(1, length)).sum()
    return lambda: (reducer.arm(1.0), loss.backward(), reducer.finish())


@pytest.mark.ranks(3)
@pytest.mark.parametrize("length", [100, 100_000], ids=["short", "long"])
@pytest.mark.parametrize(
    ("way", "first"),
    [(by_hook, "distributed.data_parallel"), (by_reducer, "distributed.reducer")],
    ids=["DDP", "Training"],
)
def test_a_bucket_passes_few_files_on_its_way_down_to_mpi(world, trace, way, first, length):
    evens = list(range(0, world.size, 2))  # all of one device kind
    group = dist.new_group(evens)
    if world.rank in evens:
        backward = way(group, length)
        trace.is_on = True
        backward()
        trace.stop()  # the checks would take seconds under a profile function
        assert len(trace.done) == 2, "the thread of backward and the worker's"
        assert len(trace.passed) <= MAX_FILES, trace.passed
        assert trace.passed[0] == first
        assert room(trace.passed[-1]) == "mpi"
        for caller, called in trace.calls:
            is_down = FLOORS.index(room(called)) >= FLOORS.index(room(caller))
            assert is_down, f"{caller} calls {called}"
            assert caller == called or caller not in imported_by(called), f"{caller}, {called}"
        dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.sizes(3)
def test_a_step_passes_few_files(world):
    """In the closed form, without a run folder: from the loader to the observers."""
    passed, is_on = set(), threading.Event()

    def note(frame, event, _):
        if is_on.is_set() and event == "call":
            passed.add(module_of(frame))

    threading.setprofile(note)
    sys.setprofile(note)
    settings = {"global_batch_size": 12, "balance": "off", "check_every": 0, "log_interval": 60.0}
    with Training(linear_task(8, data=torch.ones(72, 8)), **settings) as training:
        for step in training:
            (is_on.set if step.number == 3 else is_on.clear)()
    sys.setprofile(None)
    threading.setprofile(None)
    assert len(passed - {""}) <= MAX_FILES_OF_A_STEP, sorted(passed)
