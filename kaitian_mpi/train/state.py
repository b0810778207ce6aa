"""The state of a training run: the model, its optimizer and the progress."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.residual import Residuals
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.tensor_files import TensorFile
from kaitian_mpi.train.batch_norm import RunningStatistics
from kaitian_mpi.train.checkpoint.state_lock import StateLock
from kaitian_mpi.train.partition import Partition
from kaitian_mpi.train.progress import Progress, Schedules
from kaitian_mpi.train.state_transfer import (
    broadcast_state,
    check_loadable,
    check_reloadable,
    copy_state,
    named_as,
    plain,
)
from kaitian_mpi.train.task import Computation, Task

_PARTS = {
    "model": "the model",
    "optimizers": "the optimizer",
    "schedulers": "the scheduler",
    "extra": "extra_state",
}
"""The parts of the shared state that the user's objects return, and the objects."""


class State:
    """The model, its optimizers and the progress, as each rank holds them.

    Between two steps they are bit-identical on all ranks of equal devices, except for the result of
    `rank_state`. Different devices round differently; a comparison repairs that.
    """

    def __init__(
        self,
        task: Task,
        computation: Computation,
        total_steps: int,
        wire: str = "fp32",
        *,
        moves: bool = True,
        make_partition: Callable[[nn.Module, Sequence[Optimizer]], Partition] = Partition,
    ) -> None:
        """Make the optimizers. Not collective.

        Args:
            task: its model, optimizers, schedulers and extra state.
            computation: on this rank's device.
            total_steps: of the run.
            wire: the format of gradients between hosts.
            moves: whether to move the model to the device.
            make_partition: makes this rank's part of the state; by default it has all of it.
        """
        self.computation = computation
        # Its weights keep the plain layout, which must be the same on every rank: by the layout of
        # the images alone, convolutions run at the same speed.
        self.model: nn.Module = task.model.to(computation.device) if moves else task.model
        self.optimizers = task.make_optimizers(self.model)
        self._schedules = Schedules(task, self.optimizers, total_steps)
        self.partition = make_partition(self.model, self.optimizers)
        """This rank's part of the model's and the optimizers' state."""
        self.extra = task.extra_objects()
        self.statistics = RunningStatistics(self.model)
        self.buffers = SavedBuffers(self.model, self.statistics)
        self.residuals = Residuals(wire)
        self.progress = Progress(total_steps)
        self._trainable = {name: p.requires_grad for name, p in self.model.named_parameters()}
        self.equal_at_step = 0
        """The last step after which all ranks' weights were made or found the same."""
        self.is_begun = False
        """Whether this is the run's current state, rather than a freshly initialized one."""
        self.lock = StateLock()
        """Held while the optimizer changes the state; taken by any other reader of the state."""

    @property
    def schedulers(self) -> list[Any]:
        """The learning rate schedulers, as the task's function returned them."""
        return self._schedules.schedulers

    def mark_initial(self) -> None:
        """Make this a freshly initialized state, however far other ranks get."""
        self.is_begun = False

    def mark_equal(self) -> None:
        """Note that all ranks' weights are the same after the current step."""
        self.equal_at_step = self.progress.step

    def set_total_steps(self, total_steps: int) -> None:
        """Change the number of steps of the whole run, and the schedules that depend on it."""
        self.progress.total_steps = total_steps
        with self.lock:
            self._schedules.follow(self.progress)

    def restore(self) -> None:
        """Undo what an interrupted step or evaluation has changed since `buffers.save`."""
        self.zero_gradients()
        self.buffers.restore()

    def forget(self) -> None:
        """Forget the state, as a part of it is lost: a checkpoint has to be loaded."""
        self.mark_initial()
        self.zero_gradients()
        self.partition.drop()

    def zero_gradients(self) -> None:
        """Free the gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None
        self.partition.zero_gradients()

    def collect(
        self, world: World, folder: Path | None, on_piece: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, Any], OSError | None]:
        """Return on rank 0 the whole state as `shared` does, or why it is not whole. Collective.

        What rank 0 does not have itself takes no memory, but space in `folder`; `on_piece` is
        called there whenever a piece of it has arrived.
        """
        model, optimizers, fault = self.partition.collect(world, folder, on_piece=on_piece)
        return self._shared(model, optimizers), fault

    def collect_model(
        self, world: World, folder: Path | None, on_piece: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, Any], OSError | None]:
        """Return the whole model's `state_dict` as `collect` does. Collective."""
        if not self.partition.owned:
            return self.model_state(), None
        collected = self.partition.collect(world, folder, only_values=True, on_piece=on_piece)
        return collected.model, collected.fault

    def replicas(self) -> list[torch.Tensor]:
        """Return the tensors that only steps change: the weights and the optimizers' state."""
        owned = self.partition.owned
        whole = (p for number, p in enumerate(self.model.parameters()) if number not in owned)
        tensors = [parameter.detach() for parameter in whole]
        for optimizer in self.optimizers if self.partition.is_whole else ():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    values = dict(sorted(optimizer.state.get(parameter, {}).items())).values()
                    tensors += [value for value in values if isinstance(value, torch.Tensor)]
        return tensors

    def shared(self) -> dict[str, Any]:
        """Return the part of the state that is the same on every rank, by reference."""
        return self._shared(self.model_state(), self.partition.optimizer_states())

    def _shared(
        self, model: dict[str, Any], optimizers: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        return {
            "model": model,
            "optimizers": [plain(state) for state in optimizers],
            "optimizer_types": _type_names(self.optimizers),
            "schedulers": self._schedules.states(),
            "begun_with": self._schedules.begun_with,
            "extra": {name: plain(value.state_dict()) for name, value in self.extra.items()},
            "scaler": self.computation.scaler.state_dict(),
            "progress": asdict(self.progress),
            "unfrozen": {
                name: parameter.requires_grad
                for name, parameter in self.model.named_parameters()
                if parameter.requires_grad != self._trainable.get(name)
            },
        }

    def load_shared(self, state: dict[str, Any]) -> None:
        """Load a result of `shared`, of this rank or another.

        This job's total number of steps and its optimizers' settings are kept. Settings that
        schedulers with a state of their own have changed are as saved, unless the schedules began
        with other settings: then they begin again with this job's. Settings that the script has
        changed are as saved, and all of them with schedulers in extra_state.
        """
        saved = state["optimizer_types"]
        used = _type_names(self.optimizers)
        if saved != used:
            raise UserError(
                f"cannot resume: the checkpoint has the state of {', '.join(saved)}, and the task "
                f"uses {', '.join(used)}; use the same optimizer, or another run folder (--run-dir)"
            )
        state = _named_as(state, self)
        with self.lock:
            settings = self._schedules.settings()
            try:
                self.partition.load(state["model"], state["optimizers"])
            except (RuntimeError, ValueError, KeyError) as error:
                raise UserError(
                    "cannot resume: the checkpoint is of another model or optimizer "
                    f"({textwrap.shorten(str(error), 300)}); give the same, or another run folder "
                    "(--run-dir)"
                ) from error
            for name, value in self.extra.items():
                if name in state["extra"]:
                    _load_extra(name, value, state["extra"][name])
            if self.computation.scaler.is_enabled() and state["scaler"]:
                self.computation.scaler.load_state_dict(state["scaler"])
            for name, parameter in self.model.named_parameters():
                # As the script's loop has left it, which may not come by there again.
                if name in state["unfrozen"]:
                    parameter.requires_grad_(state["unfrozen"][name])
            total_steps = self.progress.total_steps
            progress = state["progress"] | {"total_steps": total_steps}
            if "timed_steps" not in progress:  # an older checkpoint
                # Its time is of nearly all steps: of how many is not known.
                timed = {"timed_steps": progress["step"], "timed_samples": progress["samples"]}
                progress |= timed if progress["training_sec"] else {}
            self.progress = Progress(**progress)
            self.mark_equal()
            stepped = [getattr(value, "optimizer", None) for value in self.extra.values()]
            if any(optimizer is extra for optimizer in self.optimizers for extra in stepped):
                # The script steps schedulers, in extra_state, which need the saved settings.
                settings = self._schedules.settings()
            self._schedules.resume(state, settings, self.progress)
            self.statistics.set_fractions(None)
            self.is_begun = True

    def load_file(self, file: TensorFile) -> dict[str, Any]:
        """Load a result of `shared` from a file. Training must not have begun."""
        with self.lock:
            content = _named_as(file.content, self)
            model, optimizers = self.partition.take(content["model"], content["optimizers"])
            content = content | {"model": model, "optimizers": optimizers}
            if file.is_mapped:
                content = copy_state(content, self.shared(), is_mapped=True)
            self.load_shared(content)
            # What the script does at an epoch's end is done again, unless it was done with that.
            self.progress.epoch_is_over &= self.progress.script_is_done
        return content

    def check_restorable(self) -> None:
        """Save and load the state once, as checkpoints and recoveries will."""
        state = self.shared()
        for name, called in _PARTS.items():
            check_loadable(state[name], f"Task: {called}")
            check_reloadable(state[name], f"Task: the state_dict of {called}")
        # Copies of what the user's objects return, which they may change when they load it.
        settings = {name: state[name] for name in ("schedulers", "extra")}
        self.load_shared(state | copy_state(settings))
        self.is_begun = False

    def model_state(self) -> dict[str, Any]:
        """Return the model's `state_dict`, with empty tensors for what other ranks own.

        Not collective; but it waits for values that other ranks have sent.
        """
        return self.partition.model_state()

    def rank_state(self) -> dict[str, Any]:
        """Return the part of the state that differs between ranks."""
        device = self.computation.device
        return {
            "buffers": [buffer.detach().clone().cpu() for buffer in self.model.buffers()],
            "batch_norm_fractions": self.statistics.fractions,
            "residuals": self.residuals.state_dict(),
            "random_state": torch.get_rng_state(),
            "device_random_state": device_of(device).random_state(device.index or 0),
        }

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Load a result of `rank_state` from a rank with the same host and device."""
        _copy(self.model.buffers(), state["buffers"])
        self.statistics.set_fractions(state["batch_norm_fractions"])
        self.residuals.load_state_dict(state["residuals"])
        torch.set_rng_state(state["random_state"])
        device = self.computation.device
        if state["device_random_state"] is not None:
            device_of(device).set_random_state(device.index or 0, state["device_random_state"])


def load_pooled_statistics(
    state: State, rank_states: Sequence[dict[str, Any]], shares: Sequence[int]
) -> None:
    """Load the batch norm statistics of other ranks, pooled by their shares of the samples.

    Not collective.
    """
    moments = []
    for rank_state in rank_states:
        _copy(state.model.buffers(), rank_state["buffers"])
        moments.append(state.statistics.moments())
    _copy(state.model.buffers(), rank_states[0]["buffers"])
    weights = torch.tensor(shares, dtype=torch.float64) / sum(shares)
    state.statistics.load_moments(torch.tensordot(weights, torch.stack(moments), 1))


def _type_names(optimizers: Sequence[Optimizer]) -> list[str]:
    return [type(optimizer).__name__ for optimizer in optimizers]


def _named_as(shared: dict[str, Any], state: State) -> dict[str, Any]:
    """Return a result of `shared` with a state's names, with torch.compile or without."""
    trainable = dict(state.model.named_parameters())
    model = named_as(shared["model"], state.model_state())
    unfrozen = shared["unfrozen"]
    return shared | {"model": model, "unfrozen": named_as(unfrozen, trainable)}


class SavedBuffers:
    """A model's buffers as they were before a step or an evaluation, until that is committed.

    Of the state it is what a step changes before its commit. Not collective.
    """

    def __init__(self, model: nn.Module, statistics: RunningStatistics) -> None:
        self._model = model
        self._statistics = statistics
        self._saved: list[torch.Tensor] = []
        self._fractions: list[float] | None = None
        self._is_saved = False

    def save(self) -> None:
        """Save the buffers, for what is begun now."""
        buffers = list(self._model.buffers())
        if not self._saved:
            self._saved = [torch.empty_like(buffer) for buffer in buffers]
        _copy(self._saved, buffers)
        self._fractions = self._statistics.fractions
        self._is_saved = True

    def commit(self) -> None:
        """Keep what has changed since `save`."""
        if self._statistics.norms:
            self._statistics.restore_momenta()
        self._is_saved = False

    def restore(self) -> None:
        """Undo what has changed since `save`, unless that was committed."""
        self._statistics.restore_momenta()
        if self._is_saved:
            self.put_back()
            self._statistics.set_fractions(self._fractions)
        self._is_saved = False

    def put_back(self, besides: Collection[int] = ()) -> None:
        """Undo what a forward has done since `save` to the buffers, except those of some ids."""
        pairs = zip(self._model.buffers(), self._saved, strict=True)
        restored = [(buffer, saved) for buffer, saved in pairs if id(buffer) not in besides]
        _copy([buffer for buffer, _ in restored], [saved for _, saved in restored])


def sync_to_latest(state: State, world: World, is_joining: bool = False) -> int:
    """Give ranks that are behind the state of the furthest rank; return that. Collective.

    One that is joining is behind those of the same step: their scripts may have changed theirs.
    """
    rank_step = state.progress.step - 0.5 * is_joining if state.is_begun else -1
    steps = gather_values(world.comm, rank_step)
    source = steps.index(max(steps))
    if len(set(steps)) > 1:
        if rank_step < max(steps):
            state.partition.drop_start()
        behind = [rank for rank, step in enumerate(steps) if step < max(steps)]
        copy_from(state, world, source, behind)
    state.is_begun = True
    return source


def copy_from(state: State, world: World, source: int, receivers: Collection[int]) -> None:
    """Copy the state of rank `source` to some ranks. Collective.

    The other ranks keep theirs, and so their own batch norm statistics.
    """
    receives = world.rank in receivers
    # A state that is begun stays whole until all has arrived: the sender may be lost.
    content_to_send = state.shared() if world.rank == source or not state.is_begun else None
    content = broadcast_state(world.comm, content_to_send, source, receives, into=content_to_send)
    if receives:
        state.load_shared(content)


def weights(model_state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights and buffers of a `state_dict`, contiguous in host memory."""
    return {
        name: value.detach().cpu().contiguous()
        for name, value in model_state.items()
        if isinstance(value, torch.Tensor)  # not a module's extra state
    }


@torch.no_grad()
def _copy(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    pairs: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if source.device != target.device:  # not every plug-in copies lists of them between devices
            target.copy_(source)
            continue
        targets_of_dtype, sources_of_dtype = pairs.setdefault(target.dtype, ([], []))
        targets_of_dtype.append(target)
        sources_of_dtype.append(source)
    for targets_of_dtype, sources_of_dtype in pairs.values():
        torch._foreach_copy_(targets_of_dtype, sources_of_dtype)


def _load_extra(name: str, value: Any, content: Any) -> None:
    """Load one of the objects of `Task.extra_state`."""
    if isinstance(value, nn.Module):
        content = named_as(content, value.state_dict())
    try:
        value.load_state_dict(content)
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(
            f"cannot resume: extra_state {name!r} cannot load its state in the checkpoint "
            f"({textwrap.shorten(f'{type(error).__name__}: {error}', 300)}); give the same object, "
            "or another run folder (--run-dir)"
        ) from error
