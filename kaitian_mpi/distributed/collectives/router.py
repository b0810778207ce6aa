"""Decides what executes a collective: a vendor's library, MPI in host memory, or both."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from itertools import count
from typing import TYPE_CHECKING, TypeVar

import torch
from torch._C._distributed_c10d import Work
from torch.autograd import _profiler_enabled
from torch.autograd.profiler import record_function

from kaitian_mpi.distributed.collectives.collective import Collective, Tensors
from kaitian_mpi.distributed.collectives.host import HostOperations
from kaitian_mpi.distributed.collectives.staging import SideStreams
from kaitian_mpi.distributed.collectives.work import Finished
from kaitian_mpi.distributed.collectives.worker import Worker
from kaitian_mpi.errors import RankLostError, UnsupportedError
from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.observe.timeline.recorder import GroupLabel, recorded

if TYPE_CHECKING:
    from kaitian_mpi.distributed.collectives.vendor import Started, VendorLibrary

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


def check_own_device(rank: str, device: torch.device, tensors: Tensors) -> None:
    """Warn if a rank communicates tensors that are neither in host memory nor on its own device."""
    for tensor in tensors:
        if not tensor.is_cpu and tensor.device != device:
            _warn_of_device(rank, tensor.device)


@cache
def _warn_of_device(rank: str, device: torch.device) -> None:
    """Warn once, whichever process groups a rank communicates the device's tensors in."""
    _log.warning(
        "%s communicates tensors on %s, which is not its device: it may compute on another rank's. "
        "Use the device that kaitian_mpi.init() returns, or start the script by kaitian-run: see "
        "'Which device a rank takes' in docs/scripts.md",
        rank,
        device,
    )


class Router:
    """Routes each collective of a process group.

    The route depends only on the group's ranks, the operation and the tensors' dtypes, because
    other ranks may have their tensors on other devices.
    """

    def __init__(
        self,
        library: VendorLibrary | None,
        host: HostOperations,
        worker: Worker,
        streams: SideStreams,
        label: GroupLabel,
        check_devices: Callable[[Tensors], None],
    ) -> None:
        """Route to a library that connects all ranks, if there is one, and to `host`.

        A library works on copies of the caller's tensors on `streams`; `check_devices` is given the
        tensors of each call.
        """
        self._library = library
        self._host = host
        self._worker = worker
        self._streams = streams
        self._label = label
        self._check_devices = check_devices
        self._numbers = count(1)

    def run(self, collective: Collective) -> Work:
        """Start a collective, which runs after those started before it."""
        result = collective.result
        for tensor in result:
            if tensor.layout is not torch.strided and not collective.takes_sparse:
                raise UnsupportedError(
                    f"{collective.name}: a tensor has the layout {tensor.layout}; pass a dense "
                    "one (only the sum of all_reduce takes torch.sparse_coo)"
                )
        if result and result[0].is_meta:
            return Finished(result)  # no data to move; torch's other backends do the same
        self._check_devices(result)
        number = next(self._numbers)
        if not _profiler_enabled():
            return self._start(collective, result, number)
        with record_function(f"kaitian:{collective.name}"):  # as profiles show it
            return self._start(collective, result, number)

    def _start(self, collective: Collective, result: Tensors, number: int) -> Work:
        if self._library is not None and collective.on_library is not None:
            dtypes = [tensor.dtype for tensor in result]
            if self._library.serves(collective.name, dtypes, collective.op):
                return self._start_on_library(self._library, collective, result, number)
        call = collective.on_host(self._host)
        if recorder.current is not None:
            call = self._recorded(call, collective, number)
        is_async = collective.options.asyncOp
        return self._worker.run(collective.name, call, result, is_async, collective)

    def _start_on_library(
        self, library: VendorLibrary, collective: Collective, result: Tensors, number: int
    ) -> Work:
        is_async = collective.options.asyncOp
        try:
            # Queued collectives use host memory and maybe the same tensors, so they finish first.
            self._worker.drain(collective.name)
            # In the caller's thread, because a vendor's library must be called for all groups in
            # the same order on every rank.
            start: Callable[[], Started] = partial(library.start, collective)
            if recorder.current is not None:
                start = self._recorded(start, collective, number, algorithm="vendor")
            if library.can_use_in_place(collective):
                works, finish = start()
                if len(works) == 1:
                    return works[0]
            else:
                with self._streams.after_caller(collective):
                    _, finish = start()
            return self._worker.run(collective.name, finish, result, is_async)
        except RankLostError:
            if not (self._worker.records_losses and is_async):
                raise
            return Finished(result)  # the worker is broken, as after a queued collective's loss

    def _recorded(
        self, call: Callable[[], Result], collective: Collective, number: int, **args: str
    ) -> Callable[[], Result]:
        """Return the call; in a step that is recorded, one that records itself."""
        return recorded(
            call,
            collective.name,
            self._label,
            number,
            rank=self._host.rank,
            ranks=self._host.size,
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in collective.result),
            **args,
        )
