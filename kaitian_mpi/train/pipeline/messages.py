"""What stages of a pipeline send each other, while both compute."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from kaitian_mpi.errors import UserError
from kaitian_mpi.train.pipeline.chain import Spec, received, take_apart
from kaitian_mpi.train.pipeline.peers import PeerGroups

_HEADER_BYTES = 2048
_FORM, _ACTIVATION, _GRADIENT, _TAGS = 0, 1, 2, 3
_MOST_PENDING = 8  # messages that are being sent

Waits = Callable[[str], AbstractContextManager[Any]]


class Incoming:
    """The activations of a micro-batch, on their way: the form first, and then the tensors.

    The thread that polls messages posts the receives of the tensors, so that they arrive while this
    rank computes; those that a library carries are posted by `post`.
    """

    def __init__(
        self, peers: PeerGroups, source: int, micro_batch: int, device: torch.device
    ) -> None:
        self._peers, self._from, self._device = peers, (source, micro_batch), device
        self._header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        work: Any = dist.irecv(self._header, source, tag=_tag(micro_batch, _FORM))
        self._work = work
        self._is_posted = threading.Event()
        self._spec: Spec | None = None
        self._tensors: list[torch.Tensor] = []
        self._works: list[Any] = []
        self._fault: Exception | None = None
        work.get_future().then(self._post)

    def post(self) -> bool:
        """Post what a library carries if it is known what that is; return whether it is.

        It is to be called for micro-batches in the order in which they are sent.
        """
        if not self._is_posted.is_set() or self._fault is not None:
            return False
        source, _ = self._from
        if self._peers.joins(source) and not self._works:
            assert self._spec is not None
            with self._peers.beside_computing():
                self._tensors = self._empty_tensors(self._spec)
                self._works = [self._peers.receive_from(source, tensor) for tensor in self._tensors]
        return True

    def is_completed(self) -> bool:
        return self.post() and all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        self._work.wait()
        self._is_posted.wait()
        if self._fault is not None:
            raise self._fault
        self.post()
        for work in self._works:
            work.wait()

    def take(self) -> tuple[Any, list[torch.Tensor]]:
        """Return what the stage before has returned, and leaves that get its gradients."""
        assert self._spec is not None
        return received(self._spec, self._tensors)

    def _post(self, future: Any) -> None:
        try:
            future.wait()
            source, micro_batch = self._from
            self._spec = Spec(*json.loads(bytes(self._header.numpy())))
            if not self._peers.joins(source):
                tag = _tag(micro_batch, _ACTIVATION)
                self._tensors = self._empty_tensors(self._spec)
                self._works = [dist.irecv(tensor, source, tag=tag) for tensor in self._tensors]
        except Exception as error:  # raised where it is waited for
            self._fault = error
        finally:
            self._is_posted.set()

    def _empty_tensors(self, spec: Spec) -> list[torch.Tensor]:
        return [
            torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            for dtype, shape, _ in spec.tensors
        ]


class Gradients:
    """The gradients of what a stage has sent, on their way back.

    Those that a library carries are received when they are waited for: until a message comes, its
    receive would keep a part of the device busy.
    """

    def __init__(
        self, peers: PeerGroups, outputs: Sequence[torch.Tensor], source: int, micro_batch: int
    ) -> None:
        self._peers, self._source = peers, source
        with peers.beside_computing() if peers.joins(source) else nullcontext():
            self.tensors = [torch.empty_like(each, requires_grad=False) for each in outputs]
        self._works: list[Any] = []
        if not peers.joins(source):
            tag = _tag(micro_batch, _GRADIENT)
            self._works = [dist.irecv(tensor, source, tag=tag) for tensor in self.tensors]

    def is_completed(self) -> bool:
        return bool(self._works) and all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        if not self._works:
            with self._peers.beside_computing():
                receive = self._peers.receive_from
                self._works = [receive(self._source, tensor) for tensor in self.tensors]
        for work in self._works:
            work.wait()


class Outbox:
    """What this rank sends, until it has arrived."""

    def __init__(self, waits: Waits, peers: PeerGroups) -> None:
        self._waits, self._peers = waits, peers
        self._pending: list[Any] = []

    def send_activations(self, value: Any, target: int, micro_batch: int) -> list[torch.Tensor]:
        """Send what a stage has returned; return those of its tensors with a gradient."""
        spec, tensors = take_apart(value)
        content = json.dumps(spec, separators=(",", ":")).encode()
        if len(content) > _HEADER_BYTES:
            raise UserError("--layout pipeline: a layer returns too many tensors; pass on fewer")
        header = torch.frombuffer(bytearray(content.ljust(_HEADER_BYTES)), dtype=torch.uint8)
        self._keep(dist.isend(header, target, tag=_tag(micro_batch, _FORM)))
        for tensor in tensors:
            self._send(tensor.detach().contiguous(), target, _tag(micro_batch, _ACTIVATION))
        return [tensor for tensor in tensors if tensor.requires_grad]

    def send_gradients(self, leaves: Sequence[torch.Tensor], target: int, micro_batch: int) -> None:
        """Send the gradients of what a stage has received."""
        for leaf in leaves:
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            self._send(gradient.detach().contiguous(), target, _tag(micro_batch, _GRADIENT))

    def wait(self, most: int = 0) -> None:
        """Wait until at most so many messages have not arrived."""
        self._pending = [work for work in self._pending if not work.is_completed()]
        if len(self._pending) > most:
            with self._waits("activations to arrive"):
                while len(self._pending) > most:
                    self._pending.pop(0).wait()

    def _send(self, tensor: torch.Tensor, target: int, tag: int) -> None:
        if self._peers.joins(target):
            self._keep(self._peers.send_to(target, tensor))
        else:
            self._keep(dist.isend(tensor, target, tag=tag))

    def _keep(self, work: Any) -> None:
        self._pending.append(work)
        self.wait(_MOST_PENDING)


def _tag(micro_batch: int, kind: int) -> int:
    return _TAGS * micro_batch + kind
