"""A run in progress, and how each set of active ranks prepares to train it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kaitian_mpi.balance.fastest_split import RankCost
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.devices.emulation import Slowdown
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.observe.run_folder import DiskFolder, NoFolder
from kaitian_mpi.observe.sink import MetricsSink, Sinks
from kaitian_mpi.train.checkpoint.metadata import RunMetadata
from kaitian_mpi.train.checkpoint.policy import Checkpointing
from kaitian_mpi.train.checkpoint.resume_rules import Invalidated
from kaitian_mpi.train.data.loader import ShareLoader
from kaitian_mpi.train.divergence import repair_divergence
from kaitian_mpi.train.measure.allreduce import choose_allreduce, gradient_buckets
from kaitian_mpi.train.measure.plan import Plan, record_allreduce
from kaitian_mpi.train.measure.profiles import Profiles
from kaitian_mpi.train.membership import Membership
from kaitian_mpi.train.progress import count_steps
from kaitian_mpi.train.resumption import EarlierJob, begin_or_resume
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.sinks import open_sinks
from kaitian_mpi.train.state import State
from kaitian_mpi.train.summary import NAME, Summary, describe_losses
from kaitian_mpi.train.trainer import Trainer


@dataclass(kw_only=True)
class Run:
    """This rank's view of the run; each attempt to train it continues from there."""

    config: TrainingConfig
    membership: Membership
    setup: Setup
    earlier: EarlierJob
    """What was found of an earlier job."""
    profiles: Profiles
    allreduce_algorithm: str
    """The algorithm that sums gradients across device kinds, or did while there were several."""
    excluded_places: list[str]
    """The places of the ranks without which the job is faster."""
    state: State
    loader: ShareLoader
    """Of the training data; its processes stay over the epochs and the attempts."""
    checkpoints: Checkpointing
    summary: Summary
    costs: dict[str, RankCost] = field(default_factory=dict)
    """The ranks' costs as estimated while training, by place."""
    own_sinks: Sequence[MetricsSink] = ()
    """The script's own."""
    has_started: bool = False
    """Whether any attempt has begun on this rank."""
    sinks: Sinks = field(default_factory=Sinks)
    """Take the metrics; empty on a rank that does not write the files."""
    writes_metrics: bool = False
    """Whether this rank has opened its sinks."""
    fault: AgreedError | None = None
    """The error that all ranks end the run by, if any."""

    def failures(self) -> list[dict[str, Any]]:
        """Return the losses that the run has survived, in this job and earlier ones."""
        metadata = self.earlier.found.metadata
        earlier = metadata.failures if metadata is not None else []
        return earlier + describe_losses(self.membership.losses)

    def metadata(self, world: World, batch_sizes: list[int]) -> RunMetadata:
        """Return the metadata to save with the state.

        Args:
            world: the active ranks.
            batch_sizes: their batch sizes.
        """
        return RunMetadata(
            self.config,
            dict(self.profiles.by_place),
            self.excluded_places,
            self.allreduce_algorithm,
            [info.place for info in world.infos],
            batch_sizes,
            self.failures(),
            self.setup.dataset_size,
        )

    def write_summary(self) -> None:
        """Write the current summary."""
        self.summary = replace(self.summary, failures=self.failures())
        self.setup.folder.write(NAME, self.summary.to_json())

    def take_over_files(self, world: World) -> None:
        """Make the first active rank the one that writes the files."""
        folder = self.setup.folder
        if world.rank != 0:
            folder.close()
            self.setup = replace(self.setup, folder=NoFolder())
            self.sinks.close(finished=False)
            self.writes_metrics = False
        elif isinstance(folder, NoFolder) and self.setup.path is not None:
            taken = DiskFolder(self.setup.path)
            taken.claim(self.setup.job)
            self.setup = replace(self.setup, folder=taken)
            print_rank_0(world, f"{world.info} now writes the files")
        if world.rank == 0 and not self.writes_metrics:
            infos, emulated = self.membership.all_ranks.infos, bool(self.summary.emulated)
            self.sinks = open_sinks(self.config, self.setup.folder, infos, emulated, self.own_sinks)
            self.writes_metrics = True

    def choose_allreduce_again(self, world: World) -> None:
        """Set the allreduce algorithm for these ranks, if possible the one chosen before."""
        if self.membership.has_changed:
            request = (
                self.config.allreduce
                if self.allreduce_algorithm == "direct"
                else self.allreduce_algorithm
            )
            buckets = gradient_buckets(self.setup.task.model)
            choice = choose_allreduce(request, world, buckets)
            record_allreduce(self.setup, choice.seconds)
            # Where only one kind is left, the name of what was used before is kept.
            if choice.algorithm != "direct" or not self.membership.losses:
                self.allreduce_algorithm = choice.algorithm

    def plan(self, world: World) -> Plan:
        """Plan the batch sizes from the latest costs of these ranks."""
        self.profiles = self.profiles.learn(world, self.costs)
        plan = self.profiles.plan(self.config, world)
        metadata = self.earlier.remembered(Invalidated.PLAN)
        if metadata is None or self.membership.losses:
            return plan
        is_same = metadata.active_places == [info.place for info in world.infos]
        if is_same and min(metadata.batch_sizes) >= plan.min_batch:
            return replace(plan, batch_sizes=metadata.batch_sizes)
        return plan

    def restore_state(self, world: World, plan: Plan) -> None:
        """Give every rank the run's state: a surviving rank's, a checkpoint's or a fresh one."""
        state, samples = self.state, len(self.setup.train)
        lost = bool(self.membership.losses)
        if any(gather_values(world.comm, state.is_begun)):
            state.sync_to_latest(world)
        else:
            self.earlier = begin_or_resume(
                self.config, self.setup, self.earlier, world, state, lost
            )
        if lost:
            self.membership.share_history(world)
            repair_divergence(world, state, self.sinks)
        progress = state.progress
        # Earlier steps may have had another global batch size.
        batch = sum(plan.batch_sizes)
        steps = count_steps(self.config, samples, batch, plan.min_batch, progress)
        state.set_total_steps(steps)
        has_results = all(gather_values(world.comm, self.summary.steps == progress.step))
        progress.is_done = progress.is_done and progress.step >= steps and has_results

    def make_trainer(self, world: World, plan: Plan) -> Trainer:
        """Return a trainer on these ranks; with fault tolerance, each of its steps is committed."""
        commit = self.membership.commit if self.membership.survives else None
        slowdown = Slowdown(self.setup.slowdowns[world.info.world_rank])
        setup, state = self.setup, self.state
        return Trainer(self.config, world, setup, state, plan, slowdown, self.loader, commit)

    def record_costs(self, world: World, costs: Sequence[RankCost] | None) -> None:
        """Store these ranks' costs as estimated while training; nothing if `costs` is None."""
        if costs is not None:
            places = [info.place for info in world.infos]
            self.costs = dict(zip(places, costs, strict=True))
