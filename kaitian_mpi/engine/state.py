"""The state of a training run: everything that must not be lost."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.data.sampler import steps_per_epoch
from kaitian_mpi.devices import device_of
from kaitian_mpi.engine.batch_norm import RunningStatistics
from kaitian_mpi.engine.computation import Computation, make_optimizer
from kaitian_mpi.engine.state_lock import StateLock
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import broadcast_bytes, gather_values
from kaitian_mpi.mpi.world import World


@dataclass
class Progress:
    """How far the run is: what has been done on every rank."""

    total_steps: int
    """Steps of the whole run: those done, and those left with the present batch sizes."""
    epoch: int = 0
    """Epochs trained and evaluated."""
    step: int = 0
    step_in_epoch: int = 0
    position: int = 0
    """Samples of the epoch that have been trained."""
    samples: int = 0
    """Samples that have been trained since the run began."""
    bad_steps: int = 0
    """Steps left out because their gradient was not finite."""
    bad_in_a_row: int = 0
    training_sec: float = 0.0
    """Seconds spent on training, without benchmarks, evaluations and recoveries."""
    learning_rate: float = 0.0
    is_done: bool = False
    """Whether nothing is left to train, and the model has been evaluated since."""

    def step_done(self, samples: int) -> None:
        """Count a step of so many samples, over all ranks."""
        self.step += 1
        self.step_in_epoch += 1
        self.position += samples
        self.samples += samples

    def epoch_done(self, epochs: int) -> None:
        """Count an epoch, trained as far as it goes, and evaluated."""
        self.epoch += 1
        self.step_in_epoch = self.position = 0
        self.is_done = self.epoch >= epochs or self.step >= self.total_steps

    def stopped(self) -> None:
        """Note that the run stops in mid-epoch, evaluated: more steps would train the rest."""
        self.is_done = True

    def fraction_done(self, config: TrainConfig, samples: int, epoch_samples: int) -> float:
        """Return how much of the run is done in the middle of the next step, from 0 to 1.

        In the middle, so that neither the first nor the last is made with a learning rate of 0.
        Counted in samples, so that it stays where it was when the global batch changes; or
        in steps, where `--max-steps` ends the run before its epochs do.

        Args:
            config: the epochs and steps of the run.
            samples: of the next step.
            epoch_samples: of an epoch.
        """
        fraction = (self.samples + samples / 2) / (config.epochs * epoch_samples)
        if config.max_steps:
            fraction = max(fraction, (self.step + 0.5) / config.max_steps)
        return min(1.0, fraction)


def count_steps(
    config: TrainConfig,
    samples: int,
    global_batch_size: int,
    min_batch: int = 1,
    progress: Progress | None = None,
) -> int:
    """Return the steps of a whole run: those that are done, and those that are left.

    Args:
        config: the epochs and steps of the run.
        samples: of an epoch.
        global_batch_size: of the steps that are left; those before may have had another.
        min_batch: the fewest samples that a rank can train on.
        progress: what is done; None: nothing.
    """
    done = progress or Progress(0)
    left = 0
    if done.epoch < config.epochs:
        rest = samples - done.position
        left = steps_per_epoch(rest, global_batch_size, min_batch)
        epochs = config.epochs - done.epoch - 1
        left += epochs * steps_per_epoch(samples, global_batch_size, min_batch)
    if config.max_steps:
        left = min(left, max(0, config.max_steps - done.step))
    return done.step + left


class TrainingState:
    """The model, its optimizer and how far they are, in the memory of each rank.

    Between two steps it is the same on every rank, bit by bit, except what `own` returns.
    """

    def __init__(
        self, config: TrainConfig, model: nn.Module, computation: Computation, total_steps: int
    ) -> None:
        """Begin at step 0.

        Args:
            config: the optimizer.
            model: anywhere; moved to the rank's device.
            computation: how this rank computes.
            total_steps: of the whole run.
        """
        self.computation = computation
        self.model = computation.place_model(model)
        self.optimizer = make_optimizer(config, self.model)
        self.statistics = RunningStatistics(self.model)
        self.progress = Progress(total_steps)
        self.is_begun = False
        """Whether it holds the run's current state, rather than a freshly initialised one."""
        self.lock = StateLock()
        """Held while a step is applied; taken by any other reader of the state."""
        self._kept_buffers: list[torch.Tensor] = []
        self._is_in_piece = False

    def begin_piece(self) -> None:
        """Remember what a step or an evaluation changes before it is committed: the buffers."""
        buffers = list(self.model.buffers())
        if not self._kept_buffers:
            self._kept_buffers = [torch.empty_like(buffer) for buffer in buffers]
        _copy(self._kept_buffers, buffers)
        self.statistics.keep()
        self._is_in_piece = True

    def piece_done(self) -> None:
        """What has changed stays."""
        self._is_in_piece = False

    def undo_piece(self) -> None:
        """Take back what an interrupted step or evaluation has left."""
        self.optimizer.zero_grad(set_to_none=True)
        if self._is_in_piece:
            _copy(list(self.model.buffers()), self._kept_buffers)
            self.statistics.undo()
        self._is_in_piece = False

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the model's weights and buffers, on the host, in plain layout."""
        return {
            name: value.detach().cpu().contiguous()
            for name, value in self.model.state_dict().items()
        }

    def shared(self) -> dict[str, Any]:
        """Return what is the same on every rank, by reference."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.computation.scaler.state_dict(),
            "progress": asdict(self.progress),
        }

    def load_shared(self, state: dict[str, Any]) -> None:
        """Take over what `shared` returned, here or on another rank.

        What this job's flags set is kept: the optimizer's settings and the total number of steps.

        Raises:
            UserError: it belongs to another model.
        """
        with self.lock:
            settings = [_settings(group) for group in self.optimizer.param_groups]
            try:
                self.model.load_state_dict(state["model"])
                self.optimizer.load_state_dict(state["optimizer"])
            except (RuntimeError, ValueError, KeyError) as error:
                raise UserError(
                    f"cannot resume: the checkpoint is of another model ({error}); give the same "
                    "--model, or another --run-dir"
                ) from error
            for group, own in zip(self.optimizer.param_groups, settings, strict=True):
                group.update(own)
            if self.computation.scaler.is_enabled() and state["scaler"]:
                self.computation.scaler.load_state_dict(state["scaler"])
            total_steps = self.progress.total_steps
            self.progress = Progress(**state["progress"])
            self.progress.total_steps = total_steps
            self.statistics.parts = None
            self.is_begun = True

    def own(self) -> dict[str, Any]:
        """Return what belongs to this rank alone: its buffers, and its random numbers."""
        device = self.computation.device
        return {
            "buffers": [buffer.detach().clone().cpu() for buffer in self.model.buffers()],
            "parts": self.statistics.parts,
            "random": torch.get_rng_state(),
            "device_random": device_of(device).random_state(device.index or 0),
        }

    def load_own(self, state: dict[str, Any]) -> None:
        """Take over what `own` returned on a rank like this."""
        self._load_buffers(state["buffers"])
        self.statistics.parts = state.get("parts")
        torch.set_rng_state(state["random"])
        device = self.computation.device
        if state["device_random"] is not None:
            device_of(device).set_random_state(device.index or 0, state["device_random"])

    def load_mixture(self, of_ranks: Sequence[dict[str, Any]], shares: Sequence[int]) -> None:
        """Take over what `own` returned on other ranks: the statistics of all their samples.

        Args:
            of_ranks: what each returned.
            shares: in what proportion their samples came.
        """
        self._load_buffers(of_ranks[0]["buffers"])
        moments = []
        for state in of_ranks:
            self._load_buffers(state["buffers"])
            moments.append(self.statistics.moments())
        self._load_buffers(of_ranks[0]["buffers"])
        weights = torch.tensor(shares, dtype=torch.float64) / sum(shares)
        self.statistics.load_moments(torch.tensordot(weights, torch.stack(moments), 1))

    def _load_buffers(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self.model.buffers(), values, strict=True):
                buffer.copy_(value)

    def even_out(self, world: World) -> int:
        """Give the ranks that are behind the state of one that is furthest. Collective.

        Returns:
            That rank.
        """
        steps = gather_values(world.comm, self.progress.step if self.is_begun else -1)
        source = steps.index(max(steps))
        if len(set(steps)) > 1:
            behind = [rank for rank, step in enumerate(steps) if step < max(steps)]
            self.take_from(world, source, behind)
        self.is_begun = True
        return source

    def take_from(self, world: World, source: int, receivers: Collection[int]) -> None:
        """Give some ranks the state of rank `source`. Collective.

        The others keep theirs, and with it what their own batch norms have seen.
        """
        told = broadcast_bytes(
            world.comm, to_bytes(self.shared()) if world.rank == source else None, source
        )
        if world.rank in receivers:
            self.load_shared(from_bytes(told))


def to_bytes(state: dict[str, Any]) -> bytes:
    """Return a state of tensors and plain values as bytes."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def from_bytes(content: bytes) -> dict[str, Any]:
    """Return the state of tensors and plain values that `to_bytes` was given."""
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer group's settings, without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


@torch.no_grad()
def _copy(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    pairs: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        own, other = pairs.setdefault(target.dtype, ([], []))
        own.append(target)
        other.append(source)
    for own, other in pairs.values():
        torch._foreach_copy_(own, other)
