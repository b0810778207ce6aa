"""One training run, from a config to a summary; reads top to bottom like a recipe.

Each stage is a function from frozen results to a frozen result, collective over the ranks that it
is given, and is repeated on the ranks that live where a rank is lost meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from kaitian_mpi.benchmark.allreduce import choose_allreduce, gradient_buckets
from kaitian_mpi.benchmark.exclusion import log_excluded, ranks_to_exclude
from kaitian_mpi.benchmark.plan import is_emulated
from kaitian_mpi.benchmark.profiles import Profiles, find_profiles
from kaitian_mpi.checkpoint.policy import Checkpointing
from kaitian_mpi.checkpoint.resume import hand_over
from kaitian_mpi.checkpoint.resume_rules import Renewed
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.devices.emulation import Slowdown
from kaitian_mpi.elastic.membership import Membership
from kaitian_mpi.elastic.standby import plan_standby
from kaitian_mpi.engine.computation import Computation
from kaitian_mpi.engine.setup import Ingredients, prepare
from kaitian_mpi.engine.state import TrainingState, from_bytes, to_bytes
from kaitian_mpi.errors import AgreedError, StorageError
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World
from kaitian_mpi.output.console import show_topology
from kaitian_mpi.output.run_folder import check_run_folder
from kaitian_mpi.runtime.watchdog import first_step_limit, set_phase_limit
from kaitian_mpi.training.attempt import train_run
from kaitian_mpi.training.resumption import Earlier, find_earlier
from kaitian_mpi.training.run import Run
from kaitian_mpi.training.summary import Summary

Result = TypeVar("Result")


@dataclass(frozen=True)
class Selection:
    """Which ranks train, and how they sum gradients."""

    algorithm: str
    """How gradients cross device kinds."""
    excluded: Mapping[RankInfo, str]
    """The ranks that the job is faster without, and why."""

    @property
    def excluded_numbers(self) -> list[int]:
        """The excluded ranks' numbers in MPI's world."""
        return [info.world_rank for info in self.excluded]


def train(config: TrainConfig, world: World) -> Summary:
    """Train a model and return its summary. Collective.

    Returns:
        The summary; on a rank that has not trained, little of it.

    Raises:
        AgreedError: a rank cannot make what the config asks for, and nothing has been trained; or
            the results could not be written, with the exit code of `StorageError`.
    """
    membership = Membership(world)
    show_topology(world, membership.survives)
    membership.attempt(partial(check_run_folder, config))
    on_all = partial(_on_all_ranks, membership)
    setup: Ingredients = on_all(partial(prepare, config))
    earlier: Earlier = on_all(partial(find_earlier, config, setup))
    if earlier.is_finished:
        return earlier.summary
    profiles: Profiles = on_all(partial(profile_ranks, config, setup, earlier))
    selection: Selection = on_all(partial(select_ranks, config, setup, earlier, profiles))
    state: TrainingState = on_all(partial(make_state, config, setup, profiles))
    earlier = on_all(partial(hand_over_checkpoint, config, earlier, selection))
    membership.put_on_standby(config.spares, selection.excluded_numbers)
    run = Run(
        config=config,
        membership=membership,
        setup=setup,
        earlier=replace(earlier, stood_by=membership.active is None),
        profiles=profiles,
        algorithm=selection.algorithm,
        excluded_places=[info.place for info in selection.excluded],
        state=state,
        checkpoints=Checkpointing(config, setup.path),
        summary=summary_of(world, setup, earlier, selection),
    )
    membership.attempt(partial(train_run, run))
    membership.release()
    if run.fault:  # only now, for the ranks on standby would wait for ever
        raise AgreedError(run.fault, StorageError.exit_code)
    return run.summary


def _on_all_ranks(membership: Membership, stage: Callable[[World], Result]) -> Result:
    """Do a stage while no rank is on standby."""
    result = membership.attempt(stage)
    assert result is not None
    return result


def profile_ranks(
    config: TrainConfig, setup: Ingredients, earlier: Earlier, world: World
) -> Profiles:
    """Find out what a step costs each rank, unless that is known or not asked for."""
    metadata = earlier.remembered(Renewed.COSTS)
    slowdown = Slowdown(setup.slowdowns[world.info.world_rank])
    return find_profiles(
        config, world, setup, slowdown, {} if metadata is None else metadata.profiles
    )


def select_ranks(
    config: TrainConfig, setup: Ingredients, earlier: Earlier, profiles: Profiles, world: World
) -> Selection:
    """Choose how gradients are summed, and which ranks the job is faster without."""
    buckets = gradient_buckets(setup.model)
    places = [info.place for info in world.infos]
    metadata = earlier.remembered(Renewed.ALLREDUCE)
    known = metadata.algorithm if metadata is not None and metadata.crew == places else ""
    allreduce = choose_allreduce(known or config.allreduce, world, buckets)
    metadata = earlier.remembered_exclusion(world)
    if metadata is not None and profiles.are_remembered:
        excluded = {
            rank: "as in the job before"
            for rank, place in enumerate(places)
            if place in metadata.left_out
        }
    else:
        excluded = _find_excluded(config, profiles, buckets, world)
    log_excluded(world, excluded)
    return Selection(allreduce, {world.infos[rank]: why for rank, why in excluded.items()})


def _find_excluded(
    config: TrainConfig, profiles: Profiles, buckets: Sequence[int], world: World
) -> dict[int, str]:
    """Return the ranks without which the job is faster; none where any is to be a spare."""
    costs = profiles.costs(world.infos)
    asked = not (config.keep_all or config.spares) and config.balance != "off"
    if costs is None or not asked or config.batch_policy == "paper" or world.size == 1:
        return {}
    return ranks_to_exclude(config, world, costs, buckets, profiles.min_batch)


def make_state(
    config: TrainConfig, setup: Ingredients, profiles: Profiles, world: World
) -> TrainingState:
    """Make what is trained, on ranks to be on standby too: the first time takes a second."""
    set_phase_limit(first_step_limit(config.step_timeout))
    profile = profiles.by_place[world.info.place]
    how = (world.device, profile.precision, profile.memory_format, config.label_smoothing)
    state = TrainingState(config, setup.model, Computation(*how), total_steps=0)
    state.load_shared(from_bytes(to_bytes(state.shared())))
    state.is_begun = False
    return state


def hand_over_checkpoint(
    config: TrainConfig, earlier: Earlier, selection: Selection, world: World
) -> Earlier:
    """Have the checkpoint at a rank that will train: the one that read it may be excluded."""
    standby = plan_standby(world.infos, config.spares, selection.excluded_numbers)
    return replace(earlier, found=hand_over(world, earlier.found, standby.active(world.infos)[0]))


def summary_of(world: World, setup: Ingredients, earlier: Earlier, selection: Selection) -> Summary:
    """Return what is known before the training: the results of an earlier job, too."""
    excluded = [{"rank": info.world_rank, "why": why} for info, why in selection.excluded.items()]
    return replace(earlier.summary, emulated=is_emulated(world, setup), left_out=excluded)
