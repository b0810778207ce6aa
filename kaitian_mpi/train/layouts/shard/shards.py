"""Layout shard: each rank keeps the optimizer's state, and the gradients, of its own parts only.

The parameters are whole on every rank, or sharded as well. The parts of a rank are in
proportion to its memory, its batches to its speed. If parts have mirrors, these keep and step the
same, so that all of the state is left after a rank is lost.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim
from torch.optim import Optimizer

from kaitian_mpi.balance.ownership import BUCKET_CAPS, NO_MIRROR, Pair, Part, divide
from kaitian_mpi.distributed.gathering import Gathering
from kaitian_mpi.distributed.gradients import group_into_buckets
from kaitian_mpi.distributed.shard_reducer import ShardReducer
from kaitian_mpi.distributed.sharded_model import ShardedModel
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.tensor_files import Spool
from kaitian_mpi.train.layouts.divided_state import DividedState
from kaitian_mpi.train.layouts.shard.row_states import (
    Keep,
    Key,
    copy_rows,
    count_rows,
    cover,
    find_sources,
    keep_rows,
    move_states,
)
from kaitian_mpi.train.partition import Collected
from kaitian_mpi.train.state_transfer import broadcast_state

if TYPE_CHECKING:
    from mpi4py import MPI


# Those of which each element's update depends on that element alone, so that rows can be sharded.
_BY_ELEMENT = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Rprop, optim.ASGD),
)
_VALUE = "value"
_GRADIENT_AND_STATE = 3  # their bytes, about, for each byte of a value


class Shards(DividedState[Part]):
    """The parts of a model's parameters, and of its optimizers, on this rank.

    A part is stepped as the parameter itself, or as a new one that is a view of some of its rows.
    Parameters are whole on every rank, besides those whose values are owned as well.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        sharded_model: ShardedModel | None = None,
        values: Mapping[Key, torch.Tensor] | None = None,
    ) -> None:
        """Begin without owners.

        Args:
            model: its parameters are numbered in the order of `parameters()`.
            optimizers: of the parameters; their groups change with the owners.
            sharded_model: the model, if only their owners have the values of some parameters.
            values: those that this rank has, to be kept or given away.
        """
        numbers = frozenset[int]() if sharded_model is None else sharded_model.numbers
        super().__init__(model, optimizers, numbers)
        self.sharded_model = sharded_model
        self._numbers = sorted({n for groups in self._groups for group in groups for n in group})
        self.parts: list[Part] = []
        """The parts of all ranks; empty before `assign`."""
        self._overlaps = True
        self._reducer: ShardReducer | None = None
        self._loose: dict[Key, dict[str, Any]] = {}
        """States that this rank has read, or was given, and that have no owner yet."""
        self._loaded: dict[Key, torch.Tensor] = {}
        """Owned values that it has read."""
        self._keep(self._by_number([optimizer.state_dict() for optimizer in optimizers]), {})
        for optimizer in optimizers:
            optimizer.state.clear()
        self._values = dict(values or {})
        """Owned values in this rank's own memory."""

    def _keep(
        self, states: Mapping[int, dict[str, Any]], values: Mapping[int, torch.Tensor]
    ) -> None:
        self._loose = {self._whole(number): state for number, state in states.items()}
        self._loaded = {self._whole(number): value for number, value in values.items()}

    def drop(self) -> None:
        super().drop()
        self._loose = {}
        self._values = {}
        self._loaded = {}
        self._reducer = None
        self.parts = []

    def drop_start(self) -> None:
        if not self.parts:
            self.drop()

    @property
    def has_copies(self) -> bool:
        """Whether all of the state is on two ranks."""
        return all(part.mirror != NO_MIRROR for part in self.parts)

    def is_complete(self, comm: MPI.Intracomm) -> bool:
        """Return whether these ranks have all of the state. Collective."""
        states = find_sources(comm, self._held())
        values = find_sources(comm, self._values | self._loaded)
        return all(
            sum(end - begin for _, (begin, end) in cover(sources, self._whole(number)))
            == count_rows(self._parameters[number])
            for sources, numbers in ((states, self._numbers), (values, self.owned))
            for number in numbers
        )

    def assign(self, world: World, pairs: Sequence[Pair], overlaps: bool = True) -> None:
        """Make the ranks owners and mirrors, with the state and the values there are. Collective.

        Each row of each parameter belongs to one rank. If a rank is lost meanwhile, this rank has
        what it had.

        Args:
            world: the ranks.
            pairs: the owners and mirrors.
            overlaps: whether values may arrive while a rank computes, which takes memory.
        """
        self._overlaps = overlaps
        self._share_values(world.comm)
        self.zero_gradients()
        held = self._held()
        parts = self.divide(pairs)
        wanted = [
            (_key(part), rank)
            for part in parts
            for rank in (part.owner, part.mirror)
            if rank != NO_MIRROR
        ]
        states = move_states(world.comm, held, wanted, keep_rows)
        values = self._move_values(world.comm, wanted)
        held.clear()
        self.parts = parts
        self._loose = {}
        self._values = values
        self._loaded = {}
        self.targets = {
            part: self._target(part, world.rank)
            for part in parts
            if world.rank in (part.owner, part.mirror)
        }
        targets: dict[int, list[tuple[nn.Parameter, dict[str, Any]]]] = {}
        for part, target in self.targets.items():
            targets.setdefault(part.parameter, []).append((target, states[_key(part)]))
        self._restrict(targets)

    def _share_values(self, comm: MPI.Intracomm) -> None:
        """Give every rank the parameters' values, of a rank that steps them. Collective.

        The rank that was to share them after a step may be lost.
        """
        if all(gather_values(comm, self._reducer is not None and self._reducer.values.are_here)):
            return
        if self._reducer is not None:
            self._reducer.values.restore_mirrored()
        sources = find_sources(comm, map(_key, self.targets))
        by_holders: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for number in sorted(sources.keys() - self.owned):
            parameter = self._parameters[number].detach()
            for source, (begin, end) in cover(sources, self._whole(number)):
                rows = parameter[begin:end] if parameter.dim() else parameter
                others = (
                    held.rank for held in sources[number] if held.begin <= begin and end <= held.end
                )
                by_holders.setdefault((source.rank, *others), []).append(rows)
        for holders, values in sorted(by_holders.items(), key=lambda item: item[0]):
            # One that steps these itself keeps its own: the source may be lost at this moment.
            receives = comm.rank not in holders
            arrived = broadcast_state(comm, values, holders[0], receives, into=values)
            for kept, arrived_rows in zip(values, arrived if receives else (), strict=receives):
                if kept.data_ptr() != arrived_rows.data_ptr():
                    kept.copy_(arrived_rows)

    def held(self, size: int) -> tuple[list[float], list[float]]:
        """Return the fractions that each rank owns and mirrors."""
        owned, mirrored = [0.0] * size, [0.0] * size
        counts = _counts(self._parameters, self._numbers, self.owned)
        for part in self.parts:
            rows = max(1, count_rows(self._parameters[part.parameter]))
            count = counts[part.parameter] * (part.end - part.begin) / rows
            owned[part.owner] += count
            if part.mirror != NO_MIRROR:
                mirrored[part.mirror] += count
        total = max(1, sum(owned))
        return [fraction / total for fraction in owned], [fraction / total for fraction in mirrored]

    def reducer(self, model: nn.Module, **options: Any) -> ShardReducer:
        """Return the reducer that sums the gradients to their owners."""
        options = {"overlaps": self._overlaps, **options}
        self._reducer = ShardReducer(model, parts=self.parts, targets=self.targets, **options)
        return self._reducer

    def wait_for_values(self) -> None:
        """Wait until the owners' new values are here. Not collective.

        Raises:
            CollectiveError: they will not arrive, as a rank is lost.
        """
        if self._reducer is not None:
            self._reducer.check_values()

    def gathering(self, world: World, waits: Any) -> Gathering | None:
        """Return the object that gathers parameters from their owners; None if all are whole."""
        if self.sharded_model is None:
            return None
        exchange = partial(gather_values, world.comm)
        options = {"waits": waits, "prefetches": self._overlaps}
        return Gathering(self.sharded_model, self.parts, self.targets, exchange, **options)

    def follow_data(self) -> None:
        """Let the parts be rows of parameters again whose `data` was set since. Not collective.

        Raises:
            UserError: it was set to a tensor of another shape or dtype.
        """
        for part, target in self.targets.items():
            parameter = self._parameters[part.parameter]
            if target is parameter or part.parameter in self.owned:
                continue
            skipped = part.begin * parameter.stride(0) * parameter.element_size()
            if target.data_ptr() == parameter.data_ptr() + skipped:
                continue
            rows = parameter.detach()[part.begin : part.end]
            if (rows.shape, rows.dtype) != (target.shape, target.dtype):
                raise UserError(
                    f"the data of a parameter was set to a tensor of shape "
                    f"{list(parameter.shape)} and {parameter.dtype}; keep its shape and dtype"
                )
            target.data = rows

    def collect(
        self,
        world: World,
        folder: Path | None,
        only_values: bool = False,
        on_piece: Callable[[], None] = lambda: None,
    ) -> Collected:
        whole = [self._whole(number) for number in sorted({*self._numbers, *self.owned})]
        self.wait_for_values()
        spool = Spool(folder)
        wanted = [(key, 0) for key in whole]
        held = {} if only_values else self._held()
        states = move_states(world.comm, held, wanted, spool.keep, on_piece)
        moved = self._move_values(world.comm, wanted, spool.keep, on_piece)
        optimizers = self.optimizer_states()
        if world.rank == 0:
            optimizers = self._with_states({key[0]: state for key, state in states.items()})
        values = {key[0]: value for key, value in moved.items()}
        return Collected(self._with_values(values), optimizers, spool.fault)

    def _held(self) -> dict[Key, dict[str, Any]]:
        """Return this rank's part of the state, by what it is of."""
        held = dict(self._loose)
        for part, target in self.targets.items():
            held[_key(part)] = self._state_of(target)
        return held

    def _move_values(
        self,
        comm: MPI.Intracomm,
        wanted: Iterable[tuple[Key, int]],
        keep: Keep | None = None,
        on_piece: Callable[[], None] = lambda: None,
    ) -> dict[Key, torch.Tensor]:
        """Return owned values like `move_states`; those that stay are not copied without `keep`."""
        held = {key: {_VALUE: value} for key, value in (self._loaded | self._values).items()}
        wanted = [(key, rank) for key, rank in wanted if key[0] in self.owned]
        of_file = {id(value) for value in self._loaded.values()}  # whose memory is a file's

        def keep_own(rows: Sequence[torch.Tensor]) -> torch.Tensor:
            return copy_rows(rows) if id(rows[0]) in of_file else keep_rows(rows)

        moved = move_states(comm, held, wanted, keep or keep_own, on_piece)
        return {key: state[_VALUE] for key, state in moved.items() if state}

    def _whole(self, number: int) -> Key:
        return number, 0, count_rows(self._parameters[number])

    def _target(self, part: Part, rank: int) -> nn.Parameter:
        """Return the parameter that an optimizer steps for a part."""
        key = _key(part)
        parameter = self._parameters[part.parameter]
        if key not in self._values:
            return _target(parameter, part)
        if part.owner != rank:  # a mirror has no other use for them
            return nn.Parameter(self._values[key].to(parameter.device, copy=False))
        assert self.sharded_model is not None
        target = self.sharded_model.make_target(part.parameter, self._values[key])
        self._values[key] = target.detach()
        return target

    def divide(self, pairs: Sequence[Pair]) -> list[Part]:
        """Return the parts of all parameters by owners and mirrors. Not collective."""
        by_rows = steps_by_element(self._optimizers)
        return divide_parameters(self._parameters, self._numbers, self.owned, pairs, by_rows)


def _counts(
    parameters: Sequence[nn.Parameter], stepped: Collection[int], owned: Collection[int]
) -> list[int]:
    """Return about how many bytes of each parameter's value, gradient and state are owned."""
    return [
        p.nbytes
        * (_GRADIENT_AND_STATE * (p.requires_grad and number in stepped) + (number in owned))
        for number, p in enumerate(parameters)
    ]


def steps_by_element(optimizers: Sequence[Optimizer]) -> bool:
    """Return whether optimizers can step some rows of a parameter as they would step all.

    One of a user's own class can if it steps as torch's does that it is derived from. A hook may
    look at whole gradients.
    """
    return all(
        not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        and any(
            isinstance(optimizer, kind) and _functions(optimizer) == _functions(kind)
            for kind in _BY_ELEMENT
        )
        for optimizer in optimizers
    )


def _functions(optimizer: Optimizer | type[Optimizer]) -> list[Any]:
    """Return the functions that step, without what torch and schedulers wrap around them."""
    methods = [inspect.unwrap(getattr(optimizer, name)) for name in ("step", "_init_group")]
    return [getattr(method, "__func__", method) for method in methods]


def divide_parameters(
    parameters: list[nn.Parameter],
    stepped: Collection[int],
    owned: Collection[int],
    pairs: Sequence[Pair],
    by_rows: bool,
) -> list[Part]:
    """Return the parts of a model's parameters by owners and mirrors.

    Optimizers step those with a number in `stepped`; of those in `owned`, the values belong to the
    parts. If not `by_rows`, only whole ones are owned.
    """
    counts = _counts(parameters, stepped, owned)
    order = [n for bucket in group_into_buckets(parameters, BUCKET_CAPS) for n in bucket]
    return divide(counts, [*map(count_rows, parameters)], pairs, order, by_rows)


def _key(part: Part) -> Key:
    return part.parameter, part.begin, part.end


def _target(parameter: nn.Parameter, part: Part) -> nn.Parameter:
    """Return the parameter that an optimizer steps for a part: whole, or a view of its rows."""
    if part.end - part.begin == count_rows(parameter):
        return parameter
    rows = parameter.detach()[part.begin : part.end]
    return nn.Parameter(rows, requires_grad=parameter.requires_grad)
