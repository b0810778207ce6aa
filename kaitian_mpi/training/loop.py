"""The training loop."""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from kaitian_mpi.balance.shares import cut
from kaitian_mpi.collectives.gradients import WeightedSum
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.data import LoadAdaptiveSampler, make_loader, steps_ahead
from kaitian_mpi.devices.emulation import Slowdown
from kaitian_mpi.mpi.world import World
from kaitian_mpi.training.balancing import Balancing
from kaitian_mpi.training.batch_norm import RunningStatistics
from kaitian_mpi.training.computation import Computation, make_optimizer, make_schedule
from kaitian_mpi.training.evaluation import Evaluation, evaluate
from kaitian_mpi.training.metrics import Metrics, Progress
from kaitian_mpi.training.planning import Plan
from kaitian_mpi.training.preparation import Ingredients

# Buffers are pooled before an evaluation instead of sent in every step; the name of the switch has
# changed in torch 2.13.
_NO_BUFFERS_IN_FORWARD: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}
)


class Trainer:
    """Trains one model on this rank, in step with all the others.

    Every method is collective.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        made: Ingredients,
        computation: Computation,
        plan: Plan,
        slowdown: Slowdown,
    ) -> None:
        data = made.data
        self._config, self._world, self._data = config, world, data
        self._computation, self._slowdown = computation, slowdown
        self.sampler = LoadAdaptiveSampler(
            data.train,  # type: ignore[arg-type]
            plan.batch_sizes,
            world.rank,
            seed=config.seed,
        )
        self._micro_batch = plan.micro_batch_size
        self._gradients = WeightedSum(on_bucket=self._bucket_ready)
        self.model = computation.place_model(made.model)
        self._statistics = RunningStatistics(self.model)
        self._ddp = DistributedDataParallel(
            self.model, gradient_as_bucket_view=True, **_NO_BUFFERS_IN_FORWARD
        )
        self._gradients.attach(self._ddp)
        # A 1x1 filter's gradient in channels_last names other strides for the same order of bytes.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        self._optimizer = make_optimizer(config, self.model)
        self._rate = make_schedule(config)
        self._samples_left = 0
        self.progress = Progress(total_steps=self._count_steps())
        self.metrics = Metrics(config, world, made.folder)
        self.balancing = Balancing(
            world,
            made.folder,
            plan.batch_sizes,
            plan.costs,
            adaptive=config.balance == "adaptive",
            steps_ahead=steps_ahead(config.workers),
        )
        self._clock = self.metrics.clock

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return self.progress.step >= self.progress.total_steps

    def train_epoch(self, epoch: int) -> None:
        """Train one epoch, or what `--max-steps` leaves of it."""
        for _ in self.steps(epoch):
            pass

    def steps(self, epoch: int) -> Iterator[None]:
        """Train one step of an epoch each time that the next one is asked for."""
        self.progress.epoch = epoch
        self._samples_left = len(self._data.train)  # type: ignore[arg-type]
        self._data.set_epoch(epoch)
        self.sampler.set_epoch(epoch)
        pin_memory = self._world.device.type == "cuda"
        loader = make_loader(self._data.train, self.sampler, self._config.workers, pin_memory)
        self._ddp.train()
        self.metrics.restart()
        waiting_since = time.perf_counter()
        for step_in_epoch, (inputs, labels) in enumerate(loader):
            data_sec = time.perf_counter() - waiting_since
            self._statistics.before_step(step_in_epoch)
            self.step(inputs, labels, data_sec)
            yield
            if self.finished:
                break
            waiting_since = time.perf_counter()
        self.metrics.read(self.progress)

    def close(self) -> None:
        """End what the ranks tell each other."""
        self.balancing.close()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the model's weights and buffers, on the host, in plain layout."""
        return {
            name: value.detach().cpu().contiguous()
            for name, value in self.model.state_dict().items()
        }

    def evaluate(self) -> Evaluation:
        """Pool the ranks' batch norm statistics, then evaluate on the validation data."""
        shares = self.sampler.batch_sizes
        self._statistics.pool(shares[self._world.rank] / sum(shares))
        return evaluate(
            self.model, self._data.validation, self._computation, self._world.rank, shares
        )

    def step(self, inputs: torch.Tensor, labels: torch.Tensor, data_sec: float) -> None:
        """Train on this rank's share of the next global batch.

        Args:
            inputs: on the host.
            labels: on the host.
            data_sec: seconds that getting them took.
        """
        samples = min(self.sampler.global_batch_size, self._samples_left)
        self._samples_left -= samples
        self._set_rate()
        self._gradients.weight = len(labels) / samples
        self._slowdown.go_to(self.progress.step + 1)
        self._clock.start()
        self._slowdown.start()
        loss = self._gradients_of(inputs, labels)
        self._clock.gradients_summed()
        self._slowdown.start()
        self._computation.update(self._optimizer)
        self._optimizer.zero_grad()
        self._slowdown.catch_up()
        self._clock.stop()
        self.progress.step += 1
        self.progress.samples += samples
        self._tell(loss, len(labels), samples, data_sec)

    def _gradients_of(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Leave the global batch's gradient in the parameters; return this rank's mean loss.

        A share that is larger than what fits the memory is taken in equal micro-batches, whose
        gradients add up to exactly that of the share. Only the last sums over the ranks.
        """
        sizes = cut(len(labels), self._micro_batch)
        parts = list(zip(inputs.split(sizes), labels.split(sizes), strict=True))
        losses = []
        for part_inputs, part_labels in parts[:-1]:
            with self._ddp.no_sync():
                losses.append(self._backward(part_inputs, part_labels, len(labels)))
        losses.append(self._backward(*parts[-1], len(labels)))
        return torch.stack(losses).sum()

    def _backward(
        self, inputs: torch.Tensor, labels: torch.Tensor, of_samples: int
    ) -> torch.Tensor:
        inputs, labels = self._computation.place(inputs, labels)
        loss = self._forward(inputs, labels)
        if len(labels) < of_samples:
            loss = loss * (len(labels) / of_samples)
        self._computation.scaler.scale(loss).backward()
        return loss.detach()

    def _tell(self, loss: torch.Tensor, own_samples: int, samples: int, data_sec: float) -> None:
        times = self._clock.take()
        plan = self.balancing.step_done(self.progress.step, own_samples, times, data_sec)
        if plan is not None:
            self.sampler.set_plan(plan)
        self.metrics.add_data_time(data_sec)
        self.metrics.step_done(self.progress, loss, own_samples, samples, times)

    def _forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if len(labels):
            return self._computation.loss(self._ddp, inputs, labels)
        # No sample falls to this rank in an epoch's last, partial step, yet it must take part in
        # the sum: one of zeros, with no effect on batch norm, and a weight of zero.
        self._ddp.eval()
        logits = self._computation.logits(self._ddp, inputs.new_zeros((1, *inputs.shape[1:])))
        self._ddp.train()
        return logits.sum() * 0.0

    def _bucket_ready(self) -> None:
        self._slowdown.catch_up()
        self._clock.bucket_ready()

    def _set_rate(self) -> None:
        rate = self._rate((self.progress.step + 1) / self.progress.total_steps)
        self.progress.learning_rate = rate
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def _count_steps(self) -> int:
        length = len(self._data.train)  # type: ignore[arg-type]
        steps = self._config.epochs * math.ceil(length / self.sampler.global_batch_size)
        return min(steps, self._config.max_steps or steps)
