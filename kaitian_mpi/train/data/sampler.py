"""The sampler: each rank's samples of every global step, and the loading of its shares."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from kaitian_mpi.balance.shares import apportion, merge_small
from kaitian_mpi.errors import UserError
from kaitian_mpi.train.data.batches import MicroBatch, Share, set_epoch_of
from kaitian_mpi.train.data.loader import ShareLoader


def steps_per_epoch(samples: int, global_batch_size: int, min_batch: int = 1) -> int:
    """Return the number of steps that this many samples take."""
    steps, rest = divmod(samples, global_batch_size)
    return steps + (rest >= min_batch) if steps else min(samples, 1)


def shares_of_step(remaining: int, batch_sizes: Sequence[int], min_batch: int = 1) -> list[int]:
    """Return the number of samples of each rank in the next step, the same on every rank."""
    total = sum(batch_sizes)
    if remaining == total or remaining >= total + min_batch:
        return list(batch_sizes)
    return merge_small(apportion(remaining, batch_sizes), batch_sizes, min_batch)


class LoadAdaptiveSampler(Sampler[list[int]]):
    """A distributed sampler with a different batch size per rank, changeable between steps.

    It yields this rank's sample indices of each global step as one list: use it as
    `DataLoader(dataset, sampler=sampler, batch_size=None)`. There is one permutation per epoch;
    each step takes its next `global_batch_size` samples, divided in rank order. So an epoch uses
    each sample exactly once over all ranks: no padding, no duplicates, none dropped. In an
    epoch's last, partial step a rank's list may be empty.

    The plan can change between any two steps, and a state can be loaded by any number of ranks. An
    iterator started in the middle of an epoch continues from there; one started after another
    reached the end starts the epoch again.

    No method is collective: ranks agree because they set the same plans at the same steps.

    Args:
        dataset: only its length is used.
        batch_sizes: samples per step, per rank.
        rank: this rank.
        shuffle: whether to permute the samples by (seed, epoch); otherwise in dataset order.
        seed: any integer, the same on all ranks.
        min_batch: the fewest samples that the model can train on: 2 if batch norm has a single
            value per sample and channel. A rank takes none or at least this many. A smaller
            remainder of an epoch is added to the step before it, which then exceeds the global
            batch size.

    Attributes:
        num_replicas: the number of ranks.
        epoch: the epoch of the permutation.
        position: samples of the epoch yielded so far, over all ranks. A `DataLoader` with
            workers fetches ahead of training; to save the samples trained, or to apply a plan at
            once, set this to the number of samples trained and start a new iterator.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_sizes: Sequence[int],
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        min_batch: int = 1,
    ) -> None:
        if not 0 <= rank < len(batch_sizes):
            raise ValueError(f"rank must be from 0 to {len(batch_sizes) - 1}, not {rank}")
        self.dataset = dataset
        if len(dataset) < min_batch:
            raise ValueError(f"dataset has {len(dataset)} samples; give at least {min_batch}")
        self.num_replicas = len(batch_sizes)
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.min_batch = min_batch
        self.epoch = 0
        self.position = 0
        self._ran_to_end = False
        self._plans: list[tuple[int, list[int]]] = []  # each with its first position
        self.set_plan(batch_sizes)

    @property
    def batch_sizes(self) -> list[int]:
        """Samples per step, per rank, from the next step on."""
        return list(self._batch_sizes)

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all ranks."""
        return sum(self._batch_sizes)

    @property
    def position(self) -> int:
        """The number of the epoch's samples, of all ranks, before the next step.

        Iterating begins there if it was set, also where an earlier iteration has come to the end: a
        loader with workers comes there while the last steps are still to be trained.
        """
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        self._position = value
        self._ran_to_end = False

    def set_plan(self, batch_sizes: Sequence[int]) -> None:
        """Change the batch sizes from the next step on; allowed in the middle of an epoch.

        Raises:
            ValueError: there is not one size per rank, one is negative, one is below `min_batch`
                but not 0, or all are 0.
        """
        sizes = list(batch_sizes)
        least = self.min_batch
        is_valid = any(sizes) and all(size == 0 or size >= least for size in sizes)
        if len(sizes) != self.num_replicas or not is_valid:
            raise ValueError(
                f"batch_sizes must be {self.num_replicas} numbers, one for each rank, of 0 or at "
                f"least {least}, and not all 0: {sizes}"
            )
        self._batch_sizes = sizes
        self._plans.append((self.position, self._batch_sizes))

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of another epoch; does nothing if it is the current one."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.position = 0

    def __len__(self) -> int:
        """Return the number of steps left in this epoch with the current plan."""
        left = len(self.dataset) - self.position
        return steps_per_epoch(left, self.global_batch_size, self.min_batch)

    def shares_at(self, position: int) -> list[int]:
        """Return the number of samples of each rank in the step at `position`.

        A step that a loader with workers has fetched ahead has the plan of that time.
        """
        plans = (plan for first, plan in reversed(self._plans) if first <= position)
        sizes = next(plans, self._batch_sizes)
        return shares_of_step(len(self.dataset) - position, sizes, self.min_batch)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's indices of each step, from the position to the epoch's end."""
        if self._ran_to_end:
            self.position = 0
        order = self._permutation()
        self._plans = [(self.position, self._batch_sizes)]
        while self.position < len(order):
            indices, self.position = self._share_at(order, self.position)
            yield indices
        self._ran_to_end = True

    def first_shares(self, count: int) -> Iterator[list[int]]:
        """Yield this rank's indices of the steps of the epoch's first `count` samples.

        The position neither matters nor changes.
        """
        order = self._permutation()[:count]
        position = 0
        while position < len(order):
            indices, position = self._share_at(order, position)
            yield indices

    def indices(self, position: int, count: int) -> list[int]:
        """Return the `count` sample indices of the epoch from `position` on, of all ranks."""
        return _listed(self._permutation()[position : position + count])

    def state_dict(self) -> dict[str, Any]:
        """Return the position in samples: the same on all ranks, valid for any number of ranks."""
        return {"epoch": self.epoch, "position": self.position, **self._order_of_samples()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved position, whatever the number of ranks it was saved with.

        A state saved at an epoch's end has no step left: iterating yields nothing until
        `set_epoch`.

        Raises:
            UserError: the state was saved with another seed, shuffling or dataset length.
        """
        for name, value in self._order_of_samples().items():
            if state[name] != value:
                raise UserError(
                    f"cannot resume: the checkpoint was saved with {name.replace('_', ' ')} "
                    f"{state[name]}, this run has {value}; use the same dataset and seed"
                )
        self.epoch = state["epoch"]
        self.position = state["position"]

    def _order_of_samples(self) -> dict[str, Any]:
        return {"seed": self.seed, "shuffle": self.shuffle, "dataset_length": len(self.dataset)}

    def _share_at(self, order: torch.Tensor | range, position: int) -> tuple[list[int], int]:
        """Return this rank's indices of the step at `position`, and the next step's position."""
        shares = shares_of_step(len(order) - position, self._batch_sizes, self.min_batch)
        start = position + sum(shares[: self.rank])
        return _listed(order[start : start + shares[self.rank]]), position + sum(shares)

    def _permutation(self) -> torch.Tensor | range:
        if not self.shuffle:
            return range(len(self.dataset))
        # Mixed, not added, so that seed 0 at epoch 1 differs from seed 1 at epoch 0. torch's CPU
        # generator uses only the low 32 bits.
        word = int(random_bits(self.seed, self.epoch, [0])[0]) & 0xFFFF_FFFF
        return torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(word))


class RankShares:
    """A rank's shares of the steps of one loop, in the order of its sampler; not collective.

    Attributes:
        workers: how many processes load them.
        waited_sec: how long the last share was waited for.
    """

    def __init__(
        self,
        loader: ShareLoader,
        sampler: LoadAdaptiveSampler,
        split_indices: Callable[[list[int]], list[tuple[int, list[int]]]],
        seed: int,
        rank: int,
        ranks: int,
    ) -> None:
        """Load nothing yet; `split_indices` divides a share's indices into micro-batches."""
        self.workers = loader.workers
        self.waited_sec = 0.0
        self._loader = loader
        self._sampler = sampler
        self._split_indices = split_indices
        self._seed = seed
        self._rank = rank
        self._ranks = ranks
        self._loading: Iterator[list[MicroBatch]] | None = None

    @property
    def are_loading(self) -> bool:
        """Whether the next share continues those before, wherever the run is."""
        return self._loading is not None

    def next_share(self, epoch: int, position: int) -> list[MicroBatch] | None:
        """Return the next share; None at the end of the epoch.

        Unless shares are loading, the next one begins at a position in an epoch.
        """
        waiting_since = time.perf_counter()
        if self._loading is None:
            self._go_to(epoch)
            self._sampler.position = position
            self._loading = self._loader.load(self._share(indices) for indices in self._sampler)
        micro_batches = next(self._loading, None)
        if micro_batches is None:
            self._loading = None
        self.waited_sec = time.perf_counter() - waiting_since
        return micro_batches

    def drop(self) -> None:
        """Forget the shares that are loading."""
        self._loading = None

    def first_indices(self, epoch: int, count: int) -> list[list[int]]:
        """Go to an epoch; return the indices of this rank's shares of its first samples."""
        self._go_to(epoch)
        return list(self._sampler.first_shares(count))

    def read(self, indices: list[int]) -> list[MicroBatch]:
        """Read a share in this process."""
        return self._loader.data[self._share(indices)]

    def _go_to(self, epoch: int) -> None:
        set_epoch_of(self._loader.batches, epoch)
        self._sampler.set_epoch(epoch)

    def _share(self, indices: list[int]) -> Share:
        """Return the share to load for the sampler's current step, which has these samples."""
        place = self._sampler.position * self._ranks + self._rank
        seed = int(random_bits(self._seed, self._sampler.epoch, [place])[0]) & 0xFFFF_FFFF
        return Share(self._sampler.epoch, seed, self._split_indices(indices))


def _listed(indices: torch.Tensor | range) -> list[int]:
    return indices.tolist() if isinstance(indices, torch.Tensor) else list(indices)


def random_bits(seed: int, epoch: int, indices: Sequence[int]) -> NDArray[np.uint64]:
    """Return 64 random bits for each sample index, independent of the other indices.

    This is splitmix64 (Steele, Lea and Flood, 2014, "Fast splittable pseudorandom number
    generators") at the counters `indices`, keyed by (seed, epoch).
    """
    key = _mix(np.array([seed & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64))
    key = _mix(key + np.array([epoch], dtype=np.uint64))
    return _mix(key + np.asarray(indices, dtype=np.uint64))


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # uint64 arithmetic wraps without a warning on arrays; on numpy scalars it would warn.
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
