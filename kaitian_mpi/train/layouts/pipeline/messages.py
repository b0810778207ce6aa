"""Messages between stages of a pipeline: activations and their gradients, during computation."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.polling import WaitContext
from kaitian_mpi.train.layouts.peers import PeerGroups
from kaitian_mpi.train.layouts.pipeline.chain import Spec, flatten, make_input

_HEADER_BYTES = 2048
_MAX_PENDING = 8  # messages that are being sent


class _Tags(NamedTuple):
    """The tags of a micro-batch's messages in one direction."""

    header: int
    tensors: int

    @classmethod
    def of_activations(cls, micro_batch: int) -> _Tags:
        return cls(4 * micro_batch, 4 * micro_batch + 1)

    @classmethod
    def of_gradients(cls, micro_batch: int) -> _Tags:
        return cls(4 * micro_batch + 2, 4 * micro_batch + 3)


class _Incoming:
    """Tensors on their way from another stage: first a header, which says which, and then these.

    The thread that polls messages posts the receives of the tensors, so that they arrive while this
    rank computes; those that a library carries are posted by `post`.
    """

    def __init__(self, peers: PeerGroups, source: int, header: torch.Tensor, tags: _Tags) -> None:
        """Post the receive of the header, into this tensor."""
        self._peers = peers
        self._source = source
        self._header = header
        self._tags = tags
        self._tensors: list[torch.Tensor] = []
        self._works: list[Any] = []
        self._is_posted = threading.Event()
        self._fault: Exception | None = None
        work: Any = dist.irecv(header, source, tag=tags.header)
        self._work = work
        work.get_future().then(self._post)

    def post(self) -> bool:
        """Post what a library carries if it is known what that is; return whether it is.

        It is to be called in the order in which it is sent.
        """
        if not self._is_posted.is_set() or self._fault is not None:
            return False
        if self._peers.joins(self._source) and not self._works:
            self._receive()
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

    def _empty_tensors(self) -> list[torch.Tensor]:
        """Return a tensor for each that the header, which is here, says will come."""
        raise NotImplementedError

    def _receive(self) -> None:
        source = self._source
        tag = self._tags.tensors
        with self._peers.beside_computing():
            self._tensors = self._empty_tensors()
            self._works = [
                self._peers.receive_from(source, tensor, tag) for tensor in self._tensors
            ]

    def _post(self, future: Any) -> None:
        try:
            future.wait()
            if not self._peers.joins(self._source):
                self._receive()
        except Exception as error:  # raised where it is waited for
            self._fault = error
        finally:
            self._is_posted.set()


class Activations(_Incoming):
    """The activations of a micro-batch, on their way."""

    def __init__(
        self, peers: PeerGroups, source: int, micro_batch: int, device: torch.device
    ) -> None:
        self._device = device
        self._spec: Spec | None = None
        header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        super().__init__(peers, source, header, _Tags.of_activations(micro_batch))

    def take(self) -> tuple[Any, list[torch.Tensor]]:
        """Return the previous stage's output, and the leaves that get its gradients."""
        assert self._spec is not None
        return make_input(self._spec, self._tensors)

    def _empty_tensors(self) -> list[torch.Tensor]:
        self._spec = spec = Spec(*json.loads(bytes(self._header.numpy())))
        return [
            torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            for dtype, shape, _ in spec.tensors
        ]


class Gradients(_Incoming):
    """The gradients of what a stage has sent, on their way back.

    None comes for a tensor that no loss depends on: the next stage dropped it, say. As in one
    process, what only such tensors depend on gets no gradient, and not zeros, which an optimizer's
    weight decay and momentum would act on.
    """

    def __init__(
        self, peers: PeerGroups, outputs: Sequence[torch.Tensor], source: int, micro_batch: int
    ) -> None:
        self._outputs = outputs
        header = torch.empty(len(outputs), dtype=torch.uint8)
        super().__init__(peers, source, header, _Tags.of_gradients(micro_batch))

    def backward(self) -> None:
        """Backpropagate the gradients that have arrived; call it after waiting for them."""
        if used := self._used():
            torch.autograd.backward(used, self._tensors)

    def _used(self) -> list[torch.Tensor]:
        """Return the outputs that have a gradient."""
        return [*itertools.compress(self._outputs, self._header.tolist())]

    def _empty_tensors(self) -> list[torch.Tensor]:
        return [torch.empty_like(output, requires_grad=False) for output in self._used()]


class Outbox:
    """The messages that this rank sends, until they have arrived."""

    def __init__(self, waits: WaitContext, peers: PeerGroups) -> None:
        self._waits = waits
        self._peers = peers
        self._pending: list[Any] = []

    def send_activations(self, value: Any, target: int, micro_batch: int) -> list[torch.Tensor]:
        """Send a stage's output; return those of its tensors that require gradients."""
        spec, tensors = flatten(value)
        content = json.dumps(spec, separators=(",", ":")).encode()
        if len(content) > _HEADER_BYTES:
            raise UserError(
                f"--layout pipeline: a layer returns too many tensors: their description may have "
                f"at most {_HEADER_BYTES} bytes; return fewer tensors from each layer"
            )
        header = torch.frombuffer(bytearray(content.ljust(_HEADER_BYTES)), dtype=torch.uint8)
        self._send(header, tensors, target, _Tags.of_activations(micro_batch))
        return [tensor for tensor in tensors if tensor.requires_grad]

    def send_gradients(self, leaves: Sequence[torch.Tensor], target: int, micro_batch: int) -> None:
        """Send the gradients of a stage's inputs, and which inputs have one."""
        header = torch.tensor([leaf.grad is not None for leaf in leaves], dtype=torch.uint8)
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        self._send(header, gradients, target, _Tags.of_gradients(micro_batch))

    def wait(self, limit: int = 0) -> None:
        """Wait until at most `limit` messages have not arrived."""
        self._pending = [work for work in self._pending if not work.is_completed()]
        if len(self._pending) > limit:
            with self._waits("activations to arrive"):
                while len(self._pending) > limit:
                    self._pending.pop(0).wait()

    def _send(
        self, header: torch.Tensor, tensors: Sequence[torch.Tensor], target: int, tags: _Tags
    ) -> None:
        self._keep(dist.isend(header, target, tag=tags.header))
        for tensor in tensors:
            dense = tensor.detach().contiguous()
            self._keep(self._peers.send_to(target, dense, tags.tensors))

    def _keep(self, work: Any) -> None:
        self._pending.append(work)
        self.wait(_MAX_PENDING)
