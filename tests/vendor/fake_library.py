"""A vendor's collective library for the fake accelerator, as strict as the real ones.

It keeps one of the contracts in `contracts.py`. It takes tensors of its device alone, of the types
that torch's ProcessGroupNCCL knows, contiguous and one at a time. A call returns when its kernel is
queued, on a stream that first waits for the caller's or on the caller's own; `wait` makes the
current stream wait. A kernel waits for a dead rank forever, and whoever synchronizes with its
stream waits with it: only `abort` ends it. A call that other ranks do not make alike ends the job,
where a real library would hang or mix up their data.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import signal
import threading
import time
import weakref
from datetime import timedelta

import fake_device
import torch
import torch.distributed as dist
from contracts import CONTRACTS, Contract, chosen_name
from fake_device import Event, Stream, current_stream
from fake_device.operations import keep_memory, view_of
from mpi4py import MPI
from torch._C._distributed_c10d import Work
from torch.utils._pytree import tree_map

from kaitian_mpi.mpi.world import current_world
from kaitian_mpi.runtime.abort import write_labeled
from kaitian_mpi.runtime.polling import keep_alive

NAME = "fakeccl"
OPERATIONS = {
    dist.ReduceOp.SUM: torch.add, dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PREMUL_SUM: torch.add, dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.MAX: torch.maximum,
}  # fmt: skip
HEADER_BYTES = 128
FIRST_TAG, TAGS_OF_A_RANK = 1_000, 4_096  # above those of `runtime/tags.py`
THREAD = "fake library"
"""The name of its threads."""
_LATER_SEC = 1e-3  # by which a stream goes on after what it waited for
_WATCH_SEC = 0.1

calls: list[str] = []
"""The operations that this rank has submitted to the library, in order."""

communicators: weakref.WeakSet[Library] = weakref.WeakSet()
"""Those that have not been freed."""

bytes_per_sec = float("inf")

_numbers = itertools.count()


class Library:
    """The ranks of one communicator."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._contract = CONTRACTS[chosen_name()]
        self._rank, self._size = rank, size
        self._stream: Stream | None = None
        self._last: Event | None = None
        self._aborted = threading.Event()
        self._shelf: list[LibraryWork] = []
        self._watchdog = Watchdog(self._contract, timeout)
        communicators.add(self)
        # Not a communicator of its own: threads of two groups may make theirs in different orders
        # on two ranks, in which MPI's creation may hang.
        known = current_world()
        self._comm = MPI.COMM_WORLD if known is None else known.comm
        if rank == 0:
            store.set("tag", str(FIRST_TAG + TAGS_OF_A_RANK * self._comm.rank + next(_numbers)))
        store.set(f"rank/{rank}", str(self._comm.rank))
        self._members = [int(store.get(f"rank/{rank}")) for rank in range(size)]
        self._tag = int(store.get("tag"))

    def allreduce(self, tensors, opts):
        work = functools.partial(self._reduce, self._ranks, self._reducer(tensors[0], opts))
        return self._start(opts, "allreduce", tensors, tensors, work, *tensors)

    def reduce(self, tensors, opts):
        root = opts.rootRank
        work = functools.partial(self._reduce, [root], self._reducer(tensors[0], opts))
        return self._start(opts, f"reduce to {root}", tensors, tensors, work, *tensors)

    def broadcast(self, tensors, opts):
        work = functools.partial(self._broadcast, opts.rootRank)
        return self._start(opts, f"broadcast of {opts.rootRank}", tensors, tensors, work, *tensors)

    def allgather(self, outputs, inputs, opts):
        ((pieces,), (tensor,)) = outputs, inputs
        sent = [tensor] * self._size
        scratch = _flattened(pieces)
        return self._start(
            opts, "allgather", inputs, pieces, self._swap, sent, pieces, scratch=scratch
        )

    def all_gather_single_coalesced(self, outputs, inputs, opts):
        return self._start_each(opts, "all_gather_single", outputs, inputs, self._gather_all_into)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        work = functools.partial(self._reduce_scatter_from, self._reducer(inputs[0], opts))
        return self._start_each(opts, "reduce_scatter_single", outputs, inputs, work)

    def gather(self, outputs, inputs, opts):
        pieces = self._of_root("gather", outputs, opts.rootRank)
        sent = [inputs[0] if rank == opts.rootRank else None for rank in self._ranks]
        received = pieces or [None] * self._size
        name = f"gather to {opts.rootRank}"
        return self._start(opts, name, inputs, pieces, self._swap, sent, received)

    def scatter(self, outputs, inputs, opts):
        pieces = self._of_root("scatter", inputs, opts.rootRank)
        sent = pieces or [None] * self._size
        received = [outputs[0] if rank == opts.rootRank else None for rank in self._ranks]
        name = f"scatter of {opts.rootRank}"
        return self._start(opts, name, pieces, outputs, self._swap, sent, received)

    def reduce_scatter(self, outputs, inputs, opts):
        ((output,), (pieces,)) = outputs, inputs
        work = functools.partial(self._reduce_scatter, self._reducer(output, opts))
        scratch = _flattened(pieces)
        return self._start(
            opts, "reduce_scatter", pieces, outputs, work, output, pieces, scratch=scratch
        )

    def alltoall(self, outputs, inputs, opts):
        return self._start(opts, "alltoall", inputs, outputs, self._swap, inputs, outputs)

    def all_to_all_single(self, output, tensor, output_splits, input_splits, opts):
        def work(output, tensor):
            self._swap(self._parts(tensor, input_splits), self._parts(output, output_splits))

        assert output.numel() == 0 or output.ndim
        return self._start(opts, "all_to_all_single", [tensor], [output], work, output, tensor)

    def _of_root(self, name, lists, root):
        assert len(lists) == (self._rank == root), f"{name}: pieces on the root alone"
        return lists[0] if lists else []

    def shutdown(self) -> None:
        if not self._contract.shutdown_waits:
            return
        if self._last is not None:
            self._last.synchronize()
        self._watchdog.stop()
        if self._contract.destroys_together and not self._aborted.is_set():
            with contextlib.suppress(AbortedError):
                self._from_all(torch.zeros(1))

    def abort(self) -> None:
        if self._contract.ended_by == "abort":
            self._end_kernels()

    def __getattr__(self, name):
        if name == self.__dict__["_contract"].ended_by:
            return lambda reason: self._end_kernels()
        raise AttributeError(name)

    def _end_kernels(self) -> None:
        self._aborted.set()
        self._watchdog.stop()

    def __del__(self) -> None:
        self._watchdog.stop()
        self._watchdog.join()

    # What follows runs on the library's stream, on the memory itself.

    def _reduce(self, roots, reduce, tensor):
        gathered = self._from_all(tensor)
        if self._rank in roots:
            tensor.copy_(reduce(gathered))

    def _broadcast(self, root, tensor):
        sent = [tensor if self._rank == root else None] * self._size
        received = [tensor if self._rank != root and rank == root else None for rank in self._ranks]
        self._swap(sent, received)

    def _gather_all_into(self, output, tensor):
        output.view(-1).copy_(torch.cat([part.view(-1) for part in self._from_all(tensor)]))

    def _reduce_scatter(self, reduce, output, pieces):
        received = [torch.empty_like(output) for _ in self._ranks]
        self._swap(pieces, received)
        output.copy_(reduce(received))

    def _reduce_scatter_from(self, reduce, output, tensor):
        pieces = tensor.view(self._size, -1).unbind() if tensor.numel() else [output] * self._size
        self._reduce_scatter(reduce, output.view(-1), list(pieces))

    def _parts(self, whole, splits):
        even = [whole.size(0) // self._size] * self._size if whole.ndim else []
        return list(whole.split(list(splits) or even))

    @property
    def _ranks(self):
        return range(self._size)

    def _from_all(self, tensor):
        gathered = [torch.empty_like(tensor) for _ in self._ranks]
        self._swap([tensor] * self._size, gathered)
        return gathered

    def _swap(self, sent, received):
        kept = [None if t is None else _as_bytes(t.contiguous()) for t in sent]
        came = [None if t is None else torch.empty(t.nbytes, dtype=torch.uint8) for t in received]
        self._complete(self._messages(kept, came), kept, came)
        if came[self._rank] is not None:
            came[self._rank].copy_(kept[self._rank])
        for target, content in zip(received, came, strict=True):
            if target is not None and target.numel():
                target.copy_(content.view(target.dtype).view(target.shape))

    def _messages(self, kept, came):
        for start, buffers in ((self._comm.Irecv, came), (self._comm.Isend, kept)):
            for rank, buffer in enumerate(buffers):
                if rank != self._rank and buffer is not None and buffer.numel():
                    yield start(_buffer(buffer), self._members[rank], self._tag)

    def _check_alike(self, header: str) -> None:
        own = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        text = header.encode()[:HEADER_BYTES]
        own[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        seen = [bytes(row.tolist()).rstrip(b"\0").decode() for row in self._from_all(own)]
        assert len(set(seen)) == 1, f"the ranks give the fake library different calls: {seen}"

    def _complete(self, messages, *buffers) -> None:
        """Wait as a kernel does: as long as it takes, and for a dead rank forever."""
        began, requests = time.perf_counter(), []
        try:
            for request in messages:
                requests.append(request)
            while not self._aborted.is_set():
                if MPI.Request.Testall(requests):
                    return
                # Other ranks, and other suites, need the cores.
                time.sleep(min(max((time.perf_counter() - began) / 10, 50e-6), 1e-3))
        except MPI.Exception:
            self._aborted.wait()
        keep_alive(requests, buffers)  # those of a kernel that was aborted
        raise AbortedError

    def _reducer(self, tensor, opts):
        kind = getattr(opts.reduceOp, "op", opts.reduceOp)
        if kind.name not in self._contract.reductions:
            raise ValueError(f"Cannot use {kind} with this library")
        is_refused = (kind.name, tensor.dtype) in self._contract.refused
        if is_refused or tensor.dtype not in self._contract.reduced:
            raise TypeError(f"Cannot use {kind} with {tensor.dtype}")
        if tensor.dtype is torch.bool and kind == dist.ReduceOp.SUM:
            kind = dist.ReduceOp.MAX
        factor, divides = 1, kind == dist.ReduceOp.AVG
        if kind == dist.ReduceOp.PREMUL_SUM:
            factor = torch.tensor(opts.reduceOp.__getstate__()[1]).to(tensor.dtype)
        elif divides and tensor.dtype.is_floating_point:  # before the sum, as NCCL does
            factor, divides = torch.tensor(1 / self._size).to(tensor.dtype), False

        def reduce(pieces):
            total = functools.reduce(OPERATIONS[kind], [piece * factor for piece in pieces])
            return total.div(self._size, rounding_mode="trunc") if divides else total

        return reduce

    def _start_each(self, opts, name, outputs, inputs, work):
        def all_of_them(*contents):
            half = len(contents) // 2
            for output, tensor in zip(contents[:half], contents[half:], strict=True):
                work(output, tensor)

        return self._start(opts, name, inputs, outputs, all_of_them, *outputs, *inputs)

    def _start(self, opts, name, read, written, work, *arguments, scratch=()):
        tensors = [*read, *written]
        for tensor in tensors:
            if tensor.device.type != fake_device.TYPE:
                raise RuntimeError(f"No backend type associated with device type {tensor.device}")
            if tensor.dtype not in self._contract.moved:
                raise TypeError(f"Input tensor data type is not supported: {tensor.dtype}")
            if tensor.layout is not torch.strided or not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        if name not in ("alltoall", "reduce_scatter", "allgather") and tensors:
            assert len({tensor.dtype for tensor in tensors}) == 1, "tensors of different types"
        if name.partition(" ")[0] in self._contract.lacks:
            raise RuntimeError(f"the library does not support {name}")
        calls.append(name)
        is_of_one_size = name.partition(" ")[0] in ("allreduce", "reduce", "broadcast")
        header = f"{name} {tensors[0].dtype} {tensors[0].numel() if is_of_one_size else ''}"
        if self._aborted.is_set():
            raise dist.DistBackendError("the communicator was aborted")
        raw, sources, outputs = tree_map(view_of, (arguments, list(read), list(written)))
        used = {tensor.untyped_storage().data_ptr() for tensor in read}
        unread = [view_of(t) for t in written if t.untyped_storage().data_ptr() not in used]
        is_on_own_stream = opts.asyncOp or self._contract.returns_work_always
        current = current_stream(tensors[0].device if tensors else None)
        if self._stream is None:
            self._stream = Stream(current.device)
        stream = self._stream if is_on_own_stream else current
        if is_on_own_stream:
            stream.wait_event(Event(current))
            if not self._contract.works_keep_tensors:
                for tensor in [*tensors, *scratch]:
                    keep_memory(tensor, stream)  # as the allocator is told in C++

        if self._last is not None:  # a communicator's kernels follow each other, on any streams
            stream.wait_event(self._last)

        def run():
            _spoil(unread)  # a host that reads them too early shall notice
            try:
                self._check_alike(header)
                work(*raw)
                time.sleep(sum(output.nbytes for output in outputs) / bytes_per_sec)
            except AbortedError:
                # A gather in place writes no rank's own part (NCCL's "In-place Operations"), nor do
                # the broadcasts that pieces of different sizes become; a copy of all pieces does.
                is_in_place = name == "all_gather_single" or (name == "allgather" and not scratch)
                inputs = sources if is_in_place else []
                kept = [tensor.clone() for tensor in inputs]
                _spoil(outputs)
                for tensor, content in zip(inputs, kept, strict=True):
                    tensor.copy_(content)

        stream.give(run)
        self._last = Event(stream, blocking=True)
        self._watchdog.watch(self._last)
        if not is_on_own_stream:
            return None
        started = LibraryWork(self._last, list(written), self._contract)
        if self._contract.works_keep_tensors:
            started.kept = [*tensors, *scratch]
            self._shelf = [work for work in self._shelf if not work.is_completed()] + [started]
        return started


class AbortedError(Exception):
    """A kernel was ended by `Library.abort`."""


class LibraryWork(Work):
    """An operation on the library's stream."""

    def __init__(self, done: Event, written: list[torch.Tensor], contract: Contract) -> None:
        super().__init__()
        self._done, self._written, self._contract = done, written, contract
        self.kept: list[torch.Tensor] = []
        """The tensors, if the work is what keeps them."""

    def wait(self, timeout=None) -> bool:
        current_stream().wait_event(self._done)
        current_stream().give(lambda: time.sleep(_LATER_SEC))
        self.kept = []
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done.query()

    def is_success(self) -> bool:
        if not self._contract.has_is_success:
            raise NotImplementedError("is_success() is deprecated")
        return self._done.query()

    def exception(self) -> None:
        return None

    def result(self):
        return self._written

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()

        def complete():
            self._done.synchronize()
            future.set_result(self._written)

        threading.Thread(target=complete, daemon=True).start()
        return future


class Watchdog:
    """The thread of a library: it ends the process where a kernel takes too long."""

    def __init__(self, contract: Contract, timeout: timedelta) -> None:
        self._watches = _is_on(contract.handling_variable)
        self._limit_sec = timeout.total_seconds()
        self._kernels: collections.deque = collections.deque()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=THREAD, daemon=True)
        if self._watches or _is_on(contract.polls_store_variable):
            self._thread.start()

    def watch(self, done: Event) -> None:
        if self._watches:
            self._kernels.append((time.monotonic(), done))

    def stop(self) -> None:
        self._stopped.set()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _loop(self) -> None:
        while not self._stopped.wait(_WATCH_SEC):
            while self._kernels and self._kernels[0][1].query():
                self._kernels.popleft()
            if self._kernels and time.monotonic() - self._kernels[0][0] > self._limit_sec:
                write_labeled("the library's watchdog ends the process")
                os.kill(os.getpid(), signal.SIGABRT)


def _is_on(variable: str) -> bool:
    return bool(variable) and os.environ.get(variable) != "0"


def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Library:
    """Create a communicator, for torch's registry of backends."""
    return Library(store, rank, size, timeout)


def register() -> None:
    """Register the library as a torch backend."""
    dist.Backend.register_backend(NAME, create, devices=[fake_device.TYPE])


def set_bandwidth(rate: float = float("inf")) -> None:
    """Set how many bytes a second a kernel writes; calls return before, as they do on a device."""
    global bytes_per_sec
    bytes_per_sec = rate


def _flattened(pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the copy that a library makes of pieces of one size.

    `newLikeFlat` in `ProcessGroupNCCL::allgather` and `reduce_scatter`, and the plug-ins alike.
    """
    if len({piece.numel() for piece in pieces}) != 1:
        return []
    return [pieces[0].new_empty(len(pieces) * pieces[0].numel())]


def _spoil(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        _as_bytes(tensor).fill_(fake_device.GARBAGE)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _buffer(tensor: torch.Tensor):
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
