"""A vendor's collective library, such as NCCL, for the ranks of one device kind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from kaitian_mpi.distributed.collectives import staging
from kaitian_mpi.distributed.collectives.arrivals import LibraryWatch
from kaitian_mpi.distributed.collectives.work import Queued
from kaitian_mpi.errors import CollectiveError, RankLostError
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.abort import abort_job, write_labeled
from kaitian_mpi.runtime.polling import wait_until

if TYPE_CHECKING:
    from kaitian_mpi.devices import Device
    from kaitian_mpi.distributed.collectives.collective import Collective
    from kaitian_mpi.mpi.datatypes import Reduction
    from kaitian_mpi.mpi.store import MPIStore
    from kaitian_mpi.mpi.topology import GroupComms

_log = logging.getLogger(__name__)
_LIBRARY_MARGIN = timedelta(seconds=30)  # its own error at its timeout names no rank

Started = tuple[list[Work], Callable[[], None]]
"""A library's works, and a function that waits for them on the current stream and then copies the
results to the caller's tensors."""


class VendorLibrary:
    """The ranks of this rank's group, connected by their vendor's library.

    Tensors on the host, or not contiguous, are copied to this rank's device and back, so that no
    rank depends on where another's tensors are. Operations are only started here: they run on the
    device after the work already queued on the calling thread's current stream. The library is
    initialized when it is first needed. A group of one rank needs none: no threads, no store.
    """

    def __init__(
        self,
        comms: GroupComms,
        kind: Device,
        device: torch.device,
        store: dist.Store,
        group_store: MPIStore,
        timeout: timedelta,
        on_failure: Callable[[CollectiveError], None],
    ) -> None:
        """Store what its initialization needs: `store` is for the library's bootstrap.

        `on_failure` is called, maybe from another thread, when a rank is lost; before anything that
        waits in the library goes on.
        """
        self.rank = comms.group.rank
        self.size = comms.group.size
        self._kind = kind
        self.device = device
        self._comms = comms
        self._store = store
        self._group_store = group_store
        self._timeout = timeout
        self._on_failure = on_failure
        self._failure: CollectiveError | None = None
        self._watch: LibraryWatch | None = None
        self._lock = threading.Lock()
        self._is_joined = self._is_aborted = False
        self._backend: Any = None
        self._last: Work | None = None

    def serves(self, name: str, dtypes: Iterable[torch.dtype], op: Any = None) -> bool:
        """Return whether the library has an operation.

        The same on all ranks of the group; collective over them the first time. `op` is torch's
        reduce operation, None if nothing is reduced.
        """
        if name in self._kind.vendor_lacks:
            return False
        named = None if op is None else getattr(op, "op", op).name
        if not all(self._kind.vendor_supports(dtype, named) for dtype in dtypes):
            return False
        if not self._is_joined:
            self._join()
        return True

    def _join(self) -> None:
        comms = self._comms
        group = self._comms.own
        # The group of the same ranks by kind alone, or by host too, has another prefix.
        prefix = f"vendor/{group.kind}" + ("" if group.node is None else f"/host {group.node}")
        if ulfm.is_enabled():
            faults = self._kind.leave_losses_to_caller()
            if faults and comms.world.rank == 0:
                _log.warning("%s", "; ".join(faults))
        view = self._group_store.view(prefix)
        self._watch = LibraryWatch(comms.world, group.ranks, view, self._timeout, self._fail)
        backend = None
        if self.size > 1:
            store = dist.PrefixStore(prefix, self._store)
            limit = self._timeout + _LIBRARY_MARGIN
            backend = self._kind.create_vendor_group(store, self.rank, self.size, limit)
        with self._lock:
            self._backend = backend
            self._is_joined = True
        if self._failure is not None:
            self._abort()
            raise self._failure

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self._watch is not None:
            self._watch.set_timeout(timeout)
        if hasattr(self._backend, "_set_default_timeout"):
            self._backend._set_default_timeout(timeout + _LIBRARY_MARGIN)

    def abort(self, failure: CollectiveError) -> None:
        """End what waits in the library, and make later calls fail. May be called by any thread."""
        with self._lock:
            self._failure = self._failure or failure
        self._abort()

    def _abort(self) -> None:
        with self._lock:
            backend = None if self._is_aborted else self._backend
            self._is_aborted = self._is_joined
        if backend is not None:
            self._kind.abort_vendor_group(backend)

    def close(self) -> None:
        """Wait for what this rank has started, up to the timeout, and end the library's group.

        Not collective. A library's own `shutdown` waits without a limit, and NCCL's from 2.31.2 on
        for the other ranks of the host as well (pytorch#194775), so that ranks which destroy their
        groups in different orders would wait forever.
        """
        if (last := self._last) is not None:
            limit_sec = (self._timeout + _LIBRARY_MARGIN).total_seconds()
            wait_until(lambda: self._is_aborted or last.is_completed(), limit_sec)
        self._abort()
        # The library's threads end, which use the store, by MPI: before MPI does.
        self._backend = self._last = None
        if self._watch is not None:  # to the end: the group may still wait for others
            self._watch.close()

    def _fail(self, failure: CollectiveError) -> None:
        """End what waits in the library. Called by the watch, in its thread."""
        if not isinstance(failure, RankLostError):
            # A caller that waits for the device would compute with what is not there.
            write_labeled(str(failure))
            abort_job(1)
        self._on_failure(failure)
        self.abort(failure)

    def can_use_in_place(self, collective: Collective) -> bool:
        return all(self._is_in_place(tensor) for tensor in staging.tensors_in(collective))

    def usable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor if it is contiguous and on the device, else such a copy of it.

        `staging.from_host` copies the values of a copy back.
        """
        return tensor if self._is_in_place(tensor) else staging.contiguous(tensor.to(self.device))

    def start(self, collective: Collective) -> Started:
        """Start a collective; its tensors may be on any device."""
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: the library's, the own

        def usable(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = self.usable(tensor), tensor
            return copies[id(tensor)][0]

        with self._calling(collective.name), _asking_for_a_work(collective.options):
            outputs = _changed(collective.outputs, usable)
            inputs = _changed(collective.inputs, usable)
            if self.size == 1:
                works = [_copy_alone(outputs, inputs, collective.op)]
            else:
                assert collective.on_library is not None
                works = collective.on_library(self._backend, outputs, inputs)
        self._last = works[-1] if works else None
        written = {id(tensor) for tensor in collective.result}

        def finish() -> None:
            for work in works:
                work.wait()
            # Only the current stream has waited, which may not be the one that they were made on.
            for copy, tensor in copies.values():
                if copy is not tensor:
                    staging.keep_for_current_stream(copy)
            for key in written & copies.keys():
                staging.from_host(*copies[key])

        return works, finish

    def reduce_pieces(self, tensor: torch.Tensor, shares: Sequence[int], op: Reduction) -> None:
        """Reduce piece r of a flat tensor, `shares[r]` long, to rank r, in place."""
        options = dist.ReduceOptions()
        options.reduceOp = dist.ReduceOp(op.kind)
        self._call_for_pieces("reduce", tensor, shares, options)

    def gather_pieces(self, tensor: torch.Tensor, shares: Sequence[int]) -> None:
        """Copy piece r of a flat tensor, `shares[r]` long, from rank r to every rank."""
        self._call_for_pieces("broadcast", tensor, shares, dist.BroadcastOptions())

    def _call_for_pieces(
        self, name: str, tensor: torch.Tensor, shares: Sequence[int], options: Any
    ) -> None:
        """Call the library for the parts of an all_reduce; the current stream waits for them."""
        if self.size == 1:
            return
        options.asyncOp = True  # see `_asking_for_a_work`
        for root, piece in enumerate(tensor.split(list(shares))):
            options.rootRank = root
            with self._calling("all_reduce"):
                self._last = getattr(self._backend, name)([piece], options)
                self._last.wait()

    @contextmanager
    def _calling(self, name: str) -> Iterator[None]:
        """Raise an error of the library's as a lost rank if this is the cause."""
        if self._is_aborted:
            raise RankLostError("a rank is lost")
        assert self._watch is not None
        self._watch.called(name)
        try:
            yield
        except Exception as error:
            if not self._is_aborted:
                raise
            raise RankLostError(f"a rank is lost ({error})") from None

    def _is_in_place(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type and staging.is_plain(tensor)


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return lists of any depth with each tensor replaced by `change(tensor)`."""
    return (
        change(value) if isinstance(value, torch.Tensor) else [_changed(v, change) for v in value]
    )


def _copy_alone(outputs: Any, inputs: Any, op: Any) -> Work:
    """Carry out a collective of one rank: copy what it reads to what it writes."""
    outputs, inputs = staging.tensors_in(outputs), staging.tensors_in(inputs)
    if op == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]
        inputs = [tensor.detach() * factor for tensor in inputs or outputs]
    if inputs:
        with staging.writing(outputs):
            for output, tensor in zip(outputs, inputs, strict=True):
                output.detach().view(-1).copy_(tensor.detach().view(-1))
    # The device may not have copied yet, and the caller may wait on another stream than this.
    work = Queued(outputs)
    work.finish()
    return work


@contextmanager
def _asking_for_a_work(options: Any) -> Iterator[None]:
    """Let a call with these options return a work, whether or not the caller waits at once.

    Without `asyncOp`, NCCL and XCCL run the kernel on the current stream and return None
    (`ProcessGroupNCCL::collective`, `collectiveCoalesced`), while other libraries return a work. A
    copy of the result may be made on another stream than the kernel's caller has, so that the work
    is needed.
    """
    async_op = options.asyncOp
    options.asyncOp = True
    try:
        yield
    finally:
        options.asyncOp = async_op
