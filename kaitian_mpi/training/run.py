"""What is known of a run while it is trained, and what each set of active ranks begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kaitian_mpi.balance.optimum import RankCost
from kaitian_mpi.benchmark.allreduce import choose_allreduce, gradient_buckets
from kaitian_mpi.benchmark.plan import Plan
from kaitian_mpi.benchmark.profiles import Profiles
from kaitian_mpi.checkpoint.metadata import RunMetadata
from kaitian_mpi.checkpoint.policy import Checkpointing
from kaitian_mpi.checkpoint.resume_rules import Renewed
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.devices.emulation import Slowdown
from kaitian_mpi.elastic.membership import Membership
from kaitian_mpi.engine.setup import Ingredients
from kaitian_mpi.engine.state import TrainingState, count_steps
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.output.console import say
from kaitian_mpi.output.run_folder import DiskFolder, NoFolder
from kaitian_mpi.training.divergence import repair_divergence
from kaitian_mpi.training.resumption import Earlier, begin_or_resume
from kaitian_mpi.training.summary import NAME, Summary, describe_losses
from kaitian_mpi.training.trainer import Trainer


@dataclass(kw_only=True)
class Run:
    """What this rank knows of the run; each attempt to train it goes on from there."""

    config: TrainConfig
    membership: Membership
    setup: Ingredients
    earlier: Earlier
    """What an earlier job has left."""
    profiles: Profiles
    algorithm: str
    """How gradients cross device kinds."""
    excluded_places: list[str]
    """The places of the ranks that the job is faster without."""
    state: TrainingState
    checkpoints: Checkpointing
    summary: Summary
    costs: dict[str, RankCost] = field(default_factory=dict)
    """What training has found that a step costs, by place."""
    fault: str = ""
    """Why the results are not on disk."""

    def failures(self) -> list[dict[str, Any]]:
        """Return the losses that the run has survived, in this job and in those before."""
        metadata = self.earlier.found.metadata
        earlier = metadata.failures if metadata is not None else []
        return earlier + describe_losses(self.membership.losses)

    def metadata(self, world: World, batch_sizes: list[int]) -> RunMetadata:
        """Return what is saved with the state.

        Args:
            world: the active ranks.
            batch_sizes: of these.
        """
        return RunMetadata(
            self.config,
            dict(self.profiles.by_place),
            self.excluded_places,
            self.algorithm,
            [info.place for info in world.infos],
            batch_sizes,
            self.failures(),
            self.setup.data_set,
        )

    def write_summary(self) -> None:
        """Write the summary as it is now."""
        self.summary = replace(self.summary, failures=self.failures())
        self.setup.folder.write(NAME, self.summary.to_json())

    def take_files(self, world: World) -> None:
        """Let the first of the active ranks write the files."""
        folder = self.setup.folder
        if world.rank != 0:
            self.setup = replace(self.setup, folder=NoFolder())
        elif isinstance(folder, NoFolder):
            taken = DiskFolder(self.setup.path)
            taken.mend()
            self.setup = replace(self.setup, folder=taken)
            say(world, f"the files are written by {world.info} from now on")

    def choose_allreduce_again(self, world: World) -> None:
        """Keep the algorithm that was chosen, where these ranks are of several kinds."""
        if self.membership.has_changed:
            request = self.config.allreduce if self.algorithm == "direct" else self.algorithm
            buckets = gradient_buckets(self.setup.model)
            self.algorithm = choose_allreduce(request, world, buckets)

    def plan(self, world: World) -> Plan:
        """Share the global batch, by what has been seen of these ranks last."""
        self.profiles = self.profiles.learn(world, self.costs)
        plan = self.profiles.plan(self.config, world)
        metadata = self.earlier.remembered(Renewed.PLAN)
        if metadata is None or self.membership.losses:
            return plan
        is_same = metadata.crew == [info.place for info in world.infos]
        if is_same and min(metadata.batch_sizes) >= plan.min_batch:
            return replace(plan, batch_sizes=metadata.batch_sizes)
        return plan

    def reach_state(self, world: World, plan: Plan) -> None:
        """Give every rank the state that the run has come to."""
        state, samples = self.state, len(self.setup.data.train)  # type: ignore[arg-type]
        lost = bool(self.membership.losses)
        if any(gather_values(world.comm, state.is_begun)):
            state.even_out(world)
        else:
            self.earlier = begin_or_resume(
                self.config, self.setup, self.earlier, world, state, lost
            )
        if lost:
            self.membership.share_history(world)
            repair_divergence(world, state)
        progress = state.progress
        # The steps that are done may have had another global batch.
        batch = sum(plan.batch_sizes)
        steps = count_steps(self.config, samples, batch, plan.min_batch, progress)
        progress.total_steps = steps
        has_results = all(gather_values(world.comm, self.summary.steps == progress.step))
        progress.is_done = progress.is_done and progress.step >= steps and has_results

    def make_trainer(self, world: World, plan: Plan) -> Trainer:
        """Return a trainer of these ranks; its steps are committed where losses are survived."""
        commit = self.membership.commit if self.membership.survives else None
        slowdown = Slowdown(self.setup.slowdowns[world.info.world_rank])
        return Trainer(self.config, world, self.setup, self.state, plan, slowdown, commit)

    def remember_costs(self, world: World, costs: Sequence[RankCost] | None) -> None:
        """Keep what training has found that a step costs these ranks; None: nothing."""
        if costs is not None:
            places = [info.place for info in world.infos]
            self.costs = dict(zip(places, costs, strict=True))
