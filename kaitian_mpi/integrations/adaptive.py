"""Adaptive batches in a script's own trainer: what `kaitian-run --adaptive` installs.

Every trainer passes three places of torch. A `DataLoader` gives each rank its planned slice of the
ranks' batches (batches.py). `DistributedDataParallel` averages the ranks' gradients: each is
weighted by its slice on its way into the model (losses.py), so that the average is the gradient of
the global batch. At the optimizer's step the ranks exchange their times, and after it the plan.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, MutableSet
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from kaitian_mpi.balance.cost_learner import CostLearner
from kaitian_mpi.balance.rebalancer import MAX_GROWTH, RankSteps, Rebalancer
from kaitian_mpi.devices.protocol import Mark
from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.integrations import losses
from kaitian_mpi.integrations.batches import Cut, Given, cut_loaders
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.runtime.polling import wait_request

_UNSUPPORTED = {  # by a type's name
    "DataLoaderDispatcher": "dispatch_batches: set it to False",
    "DeepSpeedEngine": "DeepSpeed: use DistributedDataParallel",
    "FullyShardedDataParallel": "FSDP: use DistributedDataParallel",
    "FSDPState": "FSDP: use DistributedDataParallel",
    "IterableDatasetShard": "an IterableDataset: use a data set with a length and an index",
}


@not_compiled
class Adaptive:
    """The adaptive batches of this process's trainer.

    The batch sizes that the script asked for, equal on all ranks, are the first plan. The costs of
    the ranks are learned from their first steps, and followed after that, as by a `Training` that
    has no benchmark.
    """

    def __init__(self, world: World) -> None:
        """Extend DataLoader, DistributedDataParallel and the optimizers' step. Collective."""
        self.rank, self.size = world.rank, world.size
        self.world, self._comm = world, world.comm.Dup()
        self._sums = False  # whether the next backward sums the gradients
        self._marks: list[Mark] = []  # of this step: its begin, and when its gradients are computed
        self._timed: deque[tuple[Mark, Mark, Mark]] = deque()  # of steps, with their ends
        self._models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._cut: Cut | None = None  # of the loader that trains
        self._shares: list[int] = []
        self._min_batch = 1
        self._learner: CostLearner | None = None
        self._rebalancer: Rebalancer | None = None
        self.cuts: MutableSet[Cut] = weakref.WeakSet()
        self._turns = itertools.count(1)
        self._now = Given(1, world.size)
        self._rule = losses.MEAN
        self.weight: Callable[[], float] = lambda: 1.0
        """Returns what the gradient of the current batch is multiplied by, on this rank."""
        self._steps = self._forwards = 0
        self._exchange: tuple[Any, np.ndarray, np.ndarray] | None = None
        self._restore = [cut_loaders(self), self._extend_ddp()]
        self._restore.append(register_optimizer_step_post_hook(self._check_supported).remove)

    def close(self) -> None:
        """Take the extensions away again; loaders that have been cut stay equal. Collective."""
        while self._restore:
            self._restore.pop()()
        self._receive()
        self._models.clear()

    @property
    def is_mean(self) -> bool:
        """Whether the loss of a batch is a mean, by rows or labels, so that it is weighted."""
        return self._rule != losses.SUM

    def shares(self, cut: Cut) -> list[int]:
        """Return how many rows of this loader's full batch each rank takes."""
        is_planned = self._cut is not None and self._cut.rows == cut.rows
        return self._shares if is_planned else [cut.rows] * self.size

    def has_new_plan(self) -> bool:
        """Return whether the ranks' times of the last step have changed the plan. Collective."""
        steps = self._receive()
        if steps is None:
            return False
        shares, reason = self._learn(steps) if self._learner else self._follow(steps)
        if shares:
            self._shares = shares
            print_rank_0(self.world, f"step {self._steps}: new plan {shares}: {reason}")
        return bool(shares)

    def _learn(self, steps: RankSteps) -> tuple[list[int] | None, str]:
        learner = self._learner
        assert learner is not None
        shares, reason = learner.observe(steps), "learning what a step costs"
        if learner.costs is not None:
            reason = f"from what the first {learner.steps} steps cost"
            self._rebalancer = Rebalancer(
                learner.costs, learner.batch_sizes, self._min_batch, MAX_GROWTH
            )
            self._learner = None
        return shares, reason

    def _follow(self, steps: RankSteps) -> tuple[list[int] | None, str]:
        plan = self._rebalancer.observe(steps) if self._rebalancer else None
        if plan is None:
            return None, ""
        return plan.batch_sizes, f"{self.world.infos[plan.rank]} {plan.reason}"

    def next_turn(self) -> int:
        """Return a number that is larger than all before."""
        return next(self._turns)

    def _extend_ddp(self) -> Callable[[], None]:
        """Watch every model that DDP wraps from now on; return what ends that."""
        create = DistributedDataParallel.__init__

        @functools.wraps(create)
        def create_and_watch(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            create(model, *args, **kwargs)
            self._models.add(model)
            if "transformers.trainer" in sys.modules:
                from kaitian_mpi.integrations.logged_losses import weight_losses

                weight_losses(lambda: self.weight(), lambda: self.is_mean, self.world)
            model.register_forward_hook(self._after_forward, with_kwargs=True)

        def restore() -> None:
            DistributedDataParallel.__init__ = create  # type: ignore[method-assign]

        DistributedDataParallel.__init__ = create_and_watch  # type: ignore[assignment, method-assign]
        return restore

    def _after_forward(
        self,
        model: DistributedDataParallel,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> Any:
        """Weight the gradients of a forward in training."""
        if not (torch.is_grad_enabled() and model.module.training and self._restore):
            return None
        cut = self._training_cut()
        if cut is None:
            return None
        if cut is not self._cut:
            self._begin(cut, model.module, args, kwargs, output)
        if cut.given:  # else it is another forward of the same batch
            self._now = cut.given.popleft()
        self._forwards += 1
        self.weight = self._weight(self._now, kwargs)
        self._sums = model.require_backward_grad_sync
        return losses.scale_gradients(output, self.weight, self._backward_done)

    def _training_cut(self) -> Cut | None:
        """Return the cut of the loader whose batch a forward in training has.

        An evaluation's loader has given later batches than the training's, which may have fetched
        one more; a batch that a forward has not taken stays with the cut that gave it.
        """
        if self._cut is not None and self._cut.given:
            return self._cut
        latest = max(self.cuts, key=lambda cut: cut.turn, default=None)
        return latest if latest is not None and latest.turn else None

    def _begin(self, cut: Cut, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Let the plan follow the speed of the ranks on this loader's batches. Collective."""
        if cut.refusal:
            raise AgreedError(cut.refusal)
        cut.trains = True
        known, self._cut = self._cut, cut
        if known is not None and known.rows == cut.rows:
            return  # such as the loader of another epoch
        rule = losses.find_rule(model, args, kwargs, output)
        found = gather_values(self._comm, [cut.rows, rule])
        rows, rules = zip(*found, strict=True)
        if len(set(rows)) > 1:
            raise AgreedError(
                f"--adaptive divides the ranks' batches itself, which are {list(rows)} rows now; "
                "give every rank the same batch size"
            )
        self._rule = rule = max(sorted(set(rules)), key=rules.count)
        if losses.UNKNOWN in rules:
            raise AgreedError(
                "--adaptive cannot weight the ranks' gradients: the loss that the model returns "
                f"is {losses.UNKNOWN}, as one with terms between rows is; leave out --adaptive"
            )
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        own_statistics = any(not isinstance(m, nn.SyncBatchNorm) for m in norms)
        self._shares = [cut.rows] * self.size
        self._min_batch = min(2, cut.rows) if own_statistics else 1
        self._learner, self._rebalancer = CostLearner(self._shares, self._min_batch), None
        inside = losses.loss_of(output) is not None
        print_rank_0(
            self.world,
            f"adaptive: batches of {cut.rows * self.size} rows over {self.size} ranks follow the "
            "ranks' speed; the loss "
            + (f"of the model is {rule}" if inside else "is taken as the mean over the batch"),
        )

    def _weight(self, given: Given, kwargs: Mapping[str, Any]) -> Callable[[], float]:
        if self._rule == losses.SUM:
            return lambda: float(given.own > 0)
        if self._rule == losses.MEAN:
            weight = given.own * self.size / given.all_ranks
            return lambda: weight
        counted = losses.count_labels(kwargs["labels"], self._rule)
        own = np.array([int(counted) if given.own else 0], dtype=np.int64)
        total = np.empty_like(own)
        request = self._comm.Iallreduce(own, total)

        @functools.cache
        def weight_of_labels() -> float:
            wait_request(request)
            return float(own[0] * self.size / max(int(total[0]), 1))

        return weight_of_labels

    def _backward_done(self) -> None:
        """Mark when all gradients are computed; DDP's callback waits for the ranks after this."""
        if self._sums:
            self._sums = False
            self._marks.append(self.world.device_kind.mark())
            torch.autograd.Variable._execution_engine.queue_callback(self._summed)

    def _summed(self) -> None:
        """Exchange the ranks' times of the step before."""
        end = self.world.device_kind.mark()
        if len(self._marks) == 2:  # not in the first step, whose begin is not known
            self._timed.append((self._marks[0], self._marks[1], end))
        self._marks = [end]
        self._steps += 1
        steps, computed, waited = 0, 0.0, 0.0
        while self._timed and self._timed[0][-1].is_reached():
            begin, ready, summed = self._timed.popleft()
            steps += 1
            computed += ready.seconds_since(begin)
            waited += summed.seconds_since(ready)
        # Per step, and per batch that is accumulated in one.
        per_batch = 1 / (max(steps, 1) * max(self._forwards, 1))
        self._forwards = 0
        self._receive()
        own = np.array([steps, self._now.own, computed * per_batch, waited * per_batch])
        found = np.empty((self.size, len(own)))
        self._exchange = self._comm.Iallgather(own, found), own, found

    def _receive(self) -> RankSteps | None:
        """Return what the ranks have exchanged since the last call, if anything."""
        if self._exchange is None:
            return None
        (request, _, found), self._exchange = self._exchange, None
        wait_request(request)
        steps, samples = found[:, :2].astype(int).T
        return RankSteps(steps, samples, found[:, 2], found[:, 3])

    def _check_supported(self, *_: Any) -> None:
        """Refuse a trainer whose batches or gradients are not in our reach. Collective."""
        if self._cut is not None:
            return
        kinds = {type(each).__name__ for each in gc.get_objects()}
        named = [text for name, text in _UNSUPPORTED.items() if name in kinds]
        why = (
            f"it does not work with {named[0]}"
            if named
            else (
                "it needs a DataLoader with torch's DistributedSampler, or one that Accelerate has "
                "prepared, and a model in DistributedDataParallel"
            )
        )
        raise AgreedError(f"--adaptive cannot divide this script's batches: {why}")


_installed: list[Adaptive] = []


def install(world: World) -> Adaptive | None:
    """Make the batches of this process's trainer adaptive; does nothing in a job of one rank.

    Call it before the script creates its loaders and its model's `DistributedDataParallel`.
    Collective over all ranks. Called again, it returns the same.
    """
    if not _installed and world.size > 1:
        _installed.append(Adaptive(world))
    return _installed[0] if _installed else None
