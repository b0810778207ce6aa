"""What stages of a pipeline send each other, while both compute."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from kaitian_mpi.errors import UserError
from kaitian_mpi.train.pipeline.chain import Spec, put_together, take_apart

_HEADER_BYTES = 2048
_FORM, _ACTIVATION, _GRADIENT, _TAGS = 0, 1, 2, 3
_MOST_PENDING = 8  # messages that are being sent

Waits = Callable[[str], AbstractContextManager[Any]]


class Incoming:
    """The activations of a micro-batch, on their way: the form first, and then the tensors.

    The thread that polls messages posts the receives of the tensors, so that they arrive while this
    rank computes.
    """

    def __init__(self, source: int, micro_batch: int, device: torch.device) -> None:
        self._from, self._device = (source, micro_batch), device
        self._header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        work: Any = dist.irecv(self._header, source, tag=_tag(micro_batch, _FORM))
        self._work = work
        self._is_posted = threading.Event()
        self._spec: Spec | None = None
        self._tensors: list[torch.Tensor] = []
        self._works: list[Any] = []
        self._fault: Exception | None = None
        work.get_future().then(self._post)

    def is_completed(self) -> bool:
        return self._is_posted.is_set() and all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        self._work.wait()
        self._is_posted.wait()
        if self._fault is not None:
            raise self._fault
        for work in self._works:
            work.wait()

    def take(self) -> tuple[Any, list[torch.Tensor]]:
        """Return what the stage before has returned, and those of its tensors with a gradient."""
        assert self._spec is not None
        rows = zip(self._tensors, self._spec.tensors, strict=True)
        leaves = [tensor.requires_grad_() for tensor, (_, _, grows) in rows if grows]
        return put_together(self._spec.form, self._tensors), leaves

    def _post(self, future: Any) -> None:
        try:
            future.wait()
            source, micro_batch = self._from
            self._spec = Spec(*json.loads(bytes(self._header.numpy())))
            for dtype, shape, _ in self._spec.tensors:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
                self._tensors.append(tensor)
                self._works.append(dist.irecv(tensor, source, tag=_tag(micro_batch, _ACTIVATION)))
        except Exception as error:  # raised where it is waited for
            self._fault = error
        finally:
            self._is_posted.set()


class Gradients:
    """The gradients of what a stage has sent, on their way back."""

    def __init__(self, outputs: Sequence[torch.Tensor], source: int, micro_batch: int) -> None:
        self.tensors = [torch.empty_like(each, requires_grad=False) for each in outputs]
        tag = _tag(micro_batch, _GRADIENT)
        self._works: list[Any] = [dist.irecv(each, source, tag=tag) for each in self.tensors]

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Outbox:
    """What this rank sends, until it has arrived."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._pending: list[Any] = []

    def send_activations(self, value: Any, target: int, micro_batch: int) -> list[torch.Tensor]:
        """Send what a stage has returned; return those of its tensors with a gradient."""
        spec, tensors = take_apart(value)
        content = json.dumps(spec, separators=(",", ":")).encode()
        if len(content) > _HEADER_BYTES:
            raise UserError("--layout pipeline: a layer returns too many tensors; pass on fewer")
        header = torch.frombuffer(bytearray(content.ljust(_HEADER_BYTES)), dtype=torch.uint8)
        self._send(header, target, _tag(micro_batch, _FORM))
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
        self.wait(_MOST_PENDING)
        self._pending.append(dist.isend(tensor, target, tag=tag))


def _tag(micro_batch: int, kind: int) -> int:
    return _TAGS * micro_batch + kind
