"""A training task: a model, its data, its loss and its optimizer, as the user gives them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from kaitian_mpi.config.factory import parameters_of
from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.gradients import check_dense
from kaitian_mpi.distributed.sync_batch_norm import local_statistics
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.abort import install_abort_hook
from kaitian_mpi.train.data.batches import is_stream, place

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
_FUNCTIONS = "loss", "parity_loss", "weight", "collate", "scheduler", "metrics"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training task, given to `Training`.

    Functions are called on every rank. A batch is whatever `collate` returns; it arrives on the
    rank's device, whatever its structure: tensors, lists, tuples, dicts, dataclasses, and objects
    with a method `to`.

    Raises:
        UserError: a part is missing or of the wrong kind.
    """

    model: nn.Module
    """Trained in place; moved to the rank's device. All ranks begin with rank 0's weights."""
    optimizer: Optimizer | Sequence[Optimizer] | Callable[[nn.Module], Any]
    """One or more optimizers of the model's parameters, or a function that makes them for the model
    that is passed in. That is called more than once: the benchmark trains a copy of the model."""
    data: Any
    """The training data: a dataset with `__getitem__` and `__len__`. If it has `__getitems__`, one
    call gets all samples of a batch; if it has `set_epoch`, that is called for each epoch. With
    `workers`, each data-loading process keeps a copy from the first step on, and only `set_epoch`
    reaches it. Or a stream, with `__iter__` and `__len__`: every rank reads all of it, in its own
    order, and keeps its samples; so it has to be the same on all ranks."""
    shuffle: bool = True
    """Whether each epoch takes the samples in another order, instead of the data's."""
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None
    """`loss(model, batch)`: the mean loss over the batch, a tensor of one element. None if the
    script computes it in its own loop, with `Training.batches`."""
    parity_loss: Callable[[nn.Module, Any], torch.Tensor] | None = None
    """The same for a task without `loss`, for the comparison of device kinds before training: it
    need not be exactly the script's. None: nothing is compared."""
    weight: Callable[[Any], float] | None = None
    """`weight(batch)`: the number of terms in the batch's mean loss, such as its non-padding
    tokens; at least 0. None: the number of samples. The batch is still on the host."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of samples; None: torch's `default_collate`."""
    scheduler: Callable[..., Any] | None = None
    """Makes a learning rate scheduler of what `optimizer` returned, or a list of them; their
    `step` is called after every step. A function with two parameters is also given the number of
    steps of the whole run; if that or a setting of the optimizer changes, it is called again,
    and the schedulers are brought to the step at which the run is. An object with `before_step`
    instead is called before every step with the fraction of the run, in samples, that is done in
    the middle of it."""
    clip_norm: float | Callable[[Iterator[nn.Parameter]], Any] | None = None
    """The largest norm of the whole gradient, after the sum over all ranks; None: no limit. Or a
    function of the model's parameters, which changes their gradients in place."""
    validation: Any = None
    """The held-out data, evaluated after each epoch; None: no evaluation."""
    metrics: Callable[[nn.Module, Any], Mapping[str, Any]] | None = None
    """`metrics(model, batch)`: by name, a sum over the batch's samples, or a pair (sum, count), of
    numbers or tensors of one element. None: the loss alone is evaluated."""
    layers: Sequence[nn.Module] | None = None
    """For `layout="pipeline"`: modules of the model in order, with all of its parameters. The first
    is called as the model is, each other one with the output of the one before, and the model must
    return what the last does. None: those of a model that is an `nn.Sequential`, or of Hugging
    Face with a `base_model_pp_plan`."""
    name: str = ""
    """Its name in results; by default the class of the model."""
    extra_state: Any = None
    """Other objects of the training, with `state_dict` and `load_state_dict`: one object, or
    several by name, of which None is left out. Saved and restored with the model."""

    def __post_init__(self) -> None:
        install_abort_hook()  # a script may make its task before it calls `init`
        if not isinstance(self.model, nn.Module):
            raise _wrong("model", "be a torch.nn.Module", self.model)
        if not self.name:
            object.__setattr__(self, "name", type(self.model).__name__)
        if any(is_lazy(parameter) for parameter in self.model.parameters()):
            raise UserError(
                "Task: parameters of the model have no shape yet; run a batch through it first"
            )
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise UserError("Task: no parameter of the model requires a gradient; unfreeze some")
        for name in _FUNCTIONS:
            value = getattr(self, name)
            if not (value is None or callable(value)):
                raise _wrong(name, "be a function", value)
        if not callable(self.optimizer):
            self.make_optimizers(self.model)  # only to check them
        if self.loss is not None and self.parity_loss is not None:
            raise UserError("Task: leave out parity_loss, since loss itself is compared")
        self._check_data("data", self.data)
        if self.validation is not None:
            self._check_data("validation", self.validation)
        if not (self.clip_norm is None or callable(self.clip_norm) or self.clip_norm > 0):
            raise UserError(f"Task: clip_norm must be above 0, not {self.clip_norm}")
        for value in self.extra_objects().values():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise _wrong("extra_state", "have state_dict and load_state_dict", value)

    def _check_data(self, name: str, data: Any) -> None:
        if isinstance(data, DataLoader):
            raise UserError(
                f"Task: {name} is a DataLoader, and Training makes the batches itself; give its "
                "dataset (loader.dataset) and its collate_fn as collate"
            )
        is_ordered = hasattr(data, "__iter__" if is_stream(data) else "__getitem__")
        if not (is_ordered and hasattr(data, "__len__")) or isinstance(data, Mapping | str | Set):
            raise _wrong(name, "be a dataset with __len__, and __getitem__ or __iter__", data)
        if len(data) == 0:
            raise UserError(f"Task: {name} has no samples; give at least 1")

    def make_optimizers(self, model: nn.Module) -> list[Optimizer]:
        """Return the optimizers of a model: the task's own, or a copy of it.

        Raises:
            UserError: the task's function returns something else, or optimizers of parameters that
                are not this model's, or that share some.
        """
        if callable(self.optimizer):
            result = self.optimizer(model)
            must = "return"
        else:
            result = self._given_optimizers(model)
            must = "be a function or"
        optimizers = [result] if isinstance(result, Optimizer) else result
        if not isinstance(optimizers, list | tuple) or not optimizers:
            raise _wrong("optimizer", f"{must} one or more optimizers", result)
        model_ids = {id(parameter) for parameter in model.parameters()}
        seen_ids: set[int] = set()
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise _wrong("optimizer", f"{must} optimizers", optimizer)
            # Of the class, because a scheduler may have replaced the optimizer's own.
            if _required_arguments(type(optimizer).step) > 1:  # besides the optimizer itself
                raise UserError(
                    f"Task: {type(optimizer).__name__} needs a closure that recomputes the loss, "
                    "which Training does not support; use another optimizer"
                )
            for group in optimizer.param_groups:
                ids = [id(parameter) for parameter in group["params"]]
                if not model_ids.issuperset(ids) or not seen_ids.isdisjoint(ids):
                    raise UserError(
                        "Task: each parameter of an optimizer must belong to the model, the one "
                        "passed to a function, and to no other optimizer"
                    )
                seen_ids.update(ids)
        return list(optimizers)

    def _given_optimizers(self, model: nn.Module) -> Any:
        """Return the optimizers that the task was given, or copies of them for a copy of it."""
        original: Any = self.optimizer
        if model is self.model:
            return original
        pairs = zip(self.model.parameters(), model.parameters(), strict=True)
        memo: dict[int, Any] = {id(parameter): copied for parameter, copied in pairs}
        optimizers = [original] if isinstance(original, Optimizer) else original
        return [_copy_optimizer(optimizer, memo) for optimizer in optimizers]

    @property
    def shuffles(self) -> bool:
        """Whether each epoch has an order of its own."""
        return self.shuffle and not is_stream(self.data)

    @property
    def tells_steps(self) -> bool:
        """Whether the scheduler is given the number of steps of the whole run."""
        return self.scheduler is not None and _required_arguments(self.scheduler) == 2

    def make_schedulers(self, optimizers: Sequence[Optimizer], total_steps: int) -> list[Any]:
        """Return the learning rate schedulers of what `make_optimizers` returned; perhaps none.

        `total_steps` are those of the whole run.
        """
        if self.scheduler is None:
            return []
        arguments: list[Any] = [optimizers[0] if len(optimizers) == 1 else list(optimizers)]
        if self.tells_steps:
            arguments.append(total_steps)
        result = self.scheduler(*arguments)
        schedulers = list(result) if isinstance(result, list | tuple) else [result]
        for scheduler in schedulers:
            if not (hasattr(scheduler, "step") or hasattr(scheduler, "before_step")):
                raise _wrong("scheduler", "return schedulers", scheduler)
            if isinstance(scheduler, ReduceLROnPlateau):
                raise UserError(
                    "Task: ReduceLROnPlateau steps with a metric; give it to extra_state, and step "
                    "it after each evaluation"
                )
        return schedulers

    def extra_objects(self) -> dict[str, Any]:
        """Return the objects whose state belongs to the training, by name."""
        if self.extra_state is None:
            return {}
        if isinstance(self.extra_state, Mapping):
            return {name: value for name, value in self.extra_state.items() if value is not None}
        return {"extra_state": self.extra_state}

    def weight_of(self, batch: Any, samples: int) -> float:
        """Return a batch's weight: the number of terms of its mean.

        Raises:
            UserError: the task's function returned no number of at least 0.
        """
        if self.weight is None:
            return float(samples)
        weight = self.weight(batch)
        try:
            value = float(weight)
        except (TypeError, ValueError, RuntimeError):  # of a tensor of several elements
            value = -1.0
        if not 0 <= value < float("inf"):
            raise UserError(f"Task: weight returned {weight!r}; return a number of at least 0")
        return value


@dataclass(frozen=True)
class JointTask:
    """A task that the ranks make together: `make` may communicate. Calling it is collective."""

    make: Callable[[World], Task]


def as_task(task: Task | JointTask | Callable[[], Task], world: World) -> Task:
    """Return a task, or what a function makes."""
    if isinstance(task, JointTask):
        return task.make(world)
    result = task if isinstance(task, Task) else task()
    if not isinstance(result, Task):
        raise UserError(
            f"Training: the function returned a {type(result).__name__}; it must return a Task"
        )
    return result


@dataclass
class Computation:
    """Forward and loss on one device, in one precision and memory layout."""

    device: torch.device
    precision: str
    memory_format: str
    scaler: torch.amp.GradScaler = field(init=False)
    """Scales the loss with fp16; disabled with other precisions."""

    def __post_init__(self) -> None:
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")

    def place(self, batch: Any) -> Any:
        """Move a batch to the device, images in the memory format."""
        return place(batch, self.device, MEMORY_FORMATS[self.memory_format])

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which to compute a forward and a loss, in the precision."""
        dtype = _AUTOCAST_DTYPES.get(self.precision)
        return torch.autocast(self.device.type, dtype) if dtype is not None else nullcontext()

    @property
    def has_autocast(self) -> bool:
        """Whether `autocast` changes anything."""
        return self.precision in _AUTOCAST_DTYPES

    def own_precision(self) -> AbstractContextManager[Any]:
        """Return the context, within `autocast`, of what is computed in the tensors' own dtypes."""
        return (
            torch.autocast(self.device.type, enabled=False) if self.has_autocast else nullcontext()
        )

    def loss(
        self, task: Task, model: nn.Module, batch: Any, needs_gradient: bool = True
    ) -> torch.Tensor:
        """Return the task's mean loss over a batch that is on the device."""
        assert task.loss is not None
        with self.autocast():
            try:
                loss = task.loss(model, batch)
            except RuntimeError as error:
                from kaitian_mpi.distributed.sharded_model import check_without_torch_func

                check_without_torch_func(model, error)
                raise
            return check_loss(loss, needs_gradient)


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Compute forwards in the block that are not part of the training. Not collective.

    They use up none of its random numbers, and no `SyncBatchNorm` waits for other ranks.
    """
    devices = [] if device_of(device).is_host else [device]
    with torch.random.fork_rng(devices, device_type=device.type), local_statistics():
        yield


@contextmanager
def borrowed(model: nn.Module) -> Iterator[nn.Module]:
    """Compute with a model itself in the block, of which no trace is left. Not collective.

    A gradient is freed as soon as it is complete, so that there is never more than a few.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = [buffer.clone() for buffer in model.buffers()]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(_free) for parameter in parameters]
    try:
        yield model.train()
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, saved in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(saved)


def _free(parameter: torch.Tensor) -> None:
    gradient = parameter.grad
    parameter.grad = None
    check_dense([gradient])


def check_loss(loss: Any, needs_gradient: bool = True) -> torch.Tensor:
    """Check a loss; return it as a float32 or float64 tensor without dimensions."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        kind = f"a {type(loss).__name__}"
        if isinstance(loss, torch.Tensor):
            kind = f"a tensor of shape {list(loss.shape)}"
        raise UserError(
            f"the loss is {kind}; it must be a tensor of one element, the mean over the batch"
        )
    if needs_gradient and torch.is_grad_enabled() and not loss.requires_grad:
        raise UserError(
            "the loss has no gradient; compute it from the model's parameters, without no_grad or "
            "detach"
        )
    loss = loss.reshape(())
    return loss if loss.dtype == torch.float64 else loss.float()


def _copy_optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Return a copy, whose parameters are in `memo`, with the attributes that torch leaves out."""
    try:
        other = copy.deepcopy(optimizer, memo)
        for name, value in vars(optimizer).items():
            # What the class has too, schedulers have put over it: it would call this optimizer.
            if name not in vars(other) and not hasattr(type(optimizer), name):
                setattr(other, name, copy.deepcopy(value, memo))
    except Exception as error:  # of the user's objects, which may raise anything
        raise UserError(
            f"Task: the optimizer cannot be copied for the benchmark ({type(error).__name__}: "
            f"{error}); give a function that makes it instead, Task(optimizer=lambda model: ...)"
        ) from error
    return other


def _required_arguments(function: Callable[..., Any]) -> int:
    """Return the number of positional arguments that a function requires, if that is known."""
    parameters = (parameters_of(function) or {}).values()
    positional = [
        parameter for parameter in parameters if parameter.kind <= parameter.POSITIONAL_OR_KEYWORD
    ]
    return sum(parameter.default is parameter.empty for parameter in positional)


def _wrong(name: str, must: str, value: object) -> UserError:
    return UserError(f"Task: {name} must {must}, not a {type(value).__name__}")
