"""A vendor's collective library, such as NCCL, for the ranks of one device kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from kaitian_mpi.distributed.collectives import staging
from kaitian_mpi.distributed.collectives.vendor_connection import VendorConnection
from kaitian_mpi.distributed.collectives.work import Queued

if TYPE_CHECKING:
    from kaitian_mpi.devices import Device
    from kaitian_mpi.distributed.collectives.collective import Collective
    from kaitian_mpi.errors import CollectiveError
    from kaitian_mpi.mpi.datatypes import Reduction

Started = tuple[list[Work], Callable[[], None]]
"""A library's works, and a function that waits for them on the current stream and then copies the
results to the caller's tensors."""


class VendorLibrary:
    """The ranks of this rank's group, connected by their vendor's library.

    Tensors on the host, or not contiguous, are copied to this rank's device and back, so that no
    rank depends on where another's tensors are. Operations are only started here: they run on the
    device after the work already queued on the calling thread's current stream.
    """

    def __init__(self, connection: VendorConnection, kind: Device, device: torch.device) -> None:
        self.size = connection.size
        self.device = device
        self._kind = kind
        self._connection = connection
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
        self._connection.make()
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._connection.set_timeout(timeout)

    def abort(self, failure: CollectiveError) -> None:
        """End what waits in the library, and make later calls fail. May be called by any thread."""
        self._connection.abort(failure)

    def close(self) -> None:
        """Wait for what this rank has started, up to the timeout, and end the library's group.

        Not collective.
        """
        if self._last is not None:
            self._connection.wait_for(self._last)
        self._connection.close()
        self._last = None  # it keeps the library's group

    def can_use_in_place(self, collective: Collective) -> bool:
        return all(self._is_in_place(tensor) for tensor in staging.tensors_in(collective))

    def usable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor if it is contiguous and on the device, else such a copy of it.

        `staging.from_host` copies the values of a copy back.
        """
        return tensor if self._is_in_place(tensor) else staging.contiguous(tensor.to(self.device))

    def start(self, collective: Collective) -> Started:
        """Start a collective; its tensors may be on any device."""
        # By the tensor's id: what the library uses, and the tensor itself.
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def usable(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = self.usable(tensor), tensor
            return copies[id(tensor)][0]

        with (
            self._connection.calling(collective.name) as backend,
            _asking_for_a_work(collective.options),
        ):
            outputs = _changed(collective.outputs, usable)
            inputs = _changed(collective.inputs, usable)
            if self.size == 1:
                works = [_copy_alone(collective.name, outputs, inputs, collective.op)]
            else:
                assert collective.on_library is not None
                works = collective.on_library(backend, outputs, inputs)
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
            with self._connection.calling("all_reduce") as backend:
                self._last = getattr(backend, name)([piece], options)
                self._last.wait()

    def _is_in_place(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type and staging.is_plain(tensor)


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return lists of any depth with each tensor replaced by `change(tensor)`."""
    return (
        change(value) if isinstance(value, torch.Tensor) else [_changed(v, change) for v in value]
    )


def _copy_alone(name: str, outputs: Any, inputs: Any, op: Any) -> Work:
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
    work = Queued(name, outputs)
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
