"""Checks, before training, that a task's layers are what its model computes.

By computing a few samples on the host, where the model is until its layers have their ranks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.tensor_files import tensors_in
from kaitian_mpi.train.layouts.pipeline.chain import (
    ModelCall,
    all_need_call,
    capture_call,
    flatten,
    run,
    unflatten,
)
from kaitian_mpi.train.layouts.pipeline.random_numbers import same_random_numbers
from kaitian_mpi.train.task import Task, borrowed

_log = logging.getLogger(__name__)

_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
_HOST = torch.device("cpu")
_ADVICE = (
    "list all that it does, in order, and let it return nothing of several layers, such as router "
    "logits"
)


@torch.no_grad()
def check_chain(task: Task, chain: Sequence[nn.Module], batches: Sequence[Any]) -> None:
    """Check that the layers make of batches what the model makes of them. Not collective.

    If the model cannot be computed on the host, there is a warning instead.

    Raises:
        UserError: they do not, or stages would not compute as one process does.
    """
    assert task.loss is not None
    # In training, only a user's list may lack something, such as a dropout.
    for trains in (True, False) if task.layers is not None else (False,):
        with borrowed(task.model) as model:
            model.train(trains)
            # If it draws random numbers, two batches would not draw them in the same order.
            used = batches[:1] if trains else batches
            calls = [_call_of(task, batch) for batch in used]
            try:
                whole = [_whole(model, call) for call in calls]
            except UserError:
                raise
            except Exception as error:  # e.g. of a kernel that only the device has
                _log.warning(
                    "the layers are not compared with the model, which fails on the host (%s: %s)",
                    type(error).__name__,
                    str(error).partition("\n")[0],
                )
                return
            _compare(whole, chain, calls)
    with borrowed(task.model):
        _check_shared_buffers(chain, _call_of(task, batches[0]))


def _call_of(task: Task, batch: Any) -> ModelCall:
    """Return the loss's call of the model; check that it does not change the batch."""
    assert task.loss is not None
    before = [tensor.clone() for tensor in tensors_in(batch)]
    call = capture_call(task.loss, task.model, batch)
    if not _are_equal(before, [*tensors_in(batch)]):
        raise UserError(
            "--layout pipeline: the loss changes its batch; let it work on a copy, because stages "
            "call it more than once"
        )
    return call


def _whole(model: nn.Module, call: ModelCall) -> list[torch.Tensor]:
    """Return the model's output for a call; check that it does not change the batch."""
    before = [tensor.clone() for tensor in tensors_in([*call])]
    with same_random_numbers(0, _HOST):
        outputs = [*tensors_in(model(*call.args, **call.kwargs))]
    if not _are_equal(before, [*tensors_in([*call])]):
        raise UserError(
            "--layout pipeline: the model changes its batch in place, which other stages do not "
            "see; let its first layer work on a copy"
        )
    return outputs


def _compare(
    whole: Sequence[list[torch.Tensor]], chain: Sequence[nn.Module], calls: Sequence[ModelCall]
) -> None:
    chained = list[list[torch.Tensor]]()
    fault = ""
    try:
        chained = [[*tensors_in(output)] for output in _chained(chain, calls)]
    except UserError:
        raise
    except Exception as error:  # of the user's layers
        fault = f"fail ({type(error).__name__}: {error})"
    if not fault and not all(map(_are_close, whole, chained)):
        fault = "return something else than the model"
    if fault:
        raise UserError(f"Task: called one after the other, the layers {fault}; {_ADVICE}")


def _chained(chain: Sequence[nn.Module], calls: Sequence[ModelCall]) -> list[Any]:
    """Return the layers' outputs for calls.

    Each layer computes all calls before the next one does, and gets copies. So what layers pass on
    besides what they return, which no other rank would get, leads to other results.
    """
    carried: list[Any] = [None] * len(calls)
    with same_random_numbers(0, _HOST):
        for number, layer in enumerate(chain):
            is_called = not number or all_need_call(chain)
            for index, call in enumerate(calls):
                output = run([layer], call if is_called else None, carried[index])
                carried[index] = output if number == len(chain) - 1 else _sent(output)
    return carried


def _sent(output: Any) -> Any:
    spec, tensors = flatten(output)
    return unflatten(spec.form, [tensor.clone() for tensor in tensors])


def _check_shared_buffers(chain: Sequence[nn.Module], call: ModelCall) -> None:
    """Check that no two layers share a buffer that training changes: each rank would have its own.

    Pieces of one model may: each stage changes them alike.
    """
    layers_of = Counter(id(buffer) for layer in chain for buffer in layer.buffers())
    if all_need_call(chain) or max(layers_of.values(), default=1) == 1:
        return
    shared = {
        (module, name): buffer.clone()
        for layer in chain
        for module in layer.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and layers_of[id(buffer)] > 1
    }
    _chained(chain, [call])
    for (module, name), before in shared.items():
        if not _are_equal([before], [*tensors_in(module._buffers[name])]):
            raise UserError(
                f"--layout pipeline: several layers share a {type(module).__name__}, whose {name} "
                "training changes; give each layer its own"
            )


def _are_equal(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


def _are_close(whole: Sequence[torch.Tensor], chained: Sequence[torch.Tensor]) -> bool:
    shapes = [tensor.shape for tensor in whole], [tensor.shape for tensor in chained]
    return shapes[0] == shapes[1] and all(map(_is_close, whole, chained))


def _is_close(output: torch.Tensor, expected: torch.Tensor) -> bool:
    most = _CLOSE.get(output.dtype, 1e-3)
    output, expected = output.double(), expected.double()
    largest = float(output.abs().max()) if output.numel() else 0.0
    return torch.allclose(output, expected, rtol=most, atol=most / 10 * largest, equal_nan=True)
