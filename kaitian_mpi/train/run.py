"""What is known of a run on this rank, and outlives lost ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.run_folder import NoFolder
from kaitian_mpi.observe.sink import MetricsSink, Sinks
from kaitian_mpi.train.checkpoint.metadata import RunMetadata
from kaitian_mpi.train.checkpoint.policy import Checkpointing
from kaitian_mpi.train.checkpoint.resume import EarlierJob
from kaitian_mpi.train.data.loader import ShareLoader
from kaitian_mpi.train.measure.plan import Profiles
from kaitian_mpi.train.membership import Membership
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.state import State
from kaitian_mpi.train.summary import NAME, describe_losses


@dataclass
class Run:
    """This rank's view of the run; each loop continues from there. No method is collective."""

    config: TrainingConfig
    membership: Membership
    setup: Setup
    """The task and the run folder."""
    earlier: EarlierJob
    """What was found of an earlier job."""
    state: State
    profiles: Profiles = field(default_factory=lambda: Profiles({}))
    allreduce_algorithm: str = ""
    """The algorithm that sums gradients across device kinds, or did while there were several."""
    excluded_places: list[str] = field(default_factory=list)
    """The places of the ranks without which the job is faster."""
    own_sinks: Sequence[MetricsSink] = ()
    """The script's own."""
    sinks: Sinks = field(default_factory=Sinks)
    """Take the metrics; empty on a rank that does not write the files."""
    writes_metrics: bool = False
    """Whether this rank has opened its sinks."""
    costs: dict[str, RankCost] = field(default_factory=dict)
    """The ranks' costs as estimated while training, by place."""
    has_started: bool = False
    """Whether any loop has begun on this rank."""
    fault: AgreedError | None = None
    """The error by which all ranks end the run, if any."""

    def __post_init__(self) -> None:
        pins_memory = self.membership.all_ranks.device_kind.pins_memory
        # Its processes stay over the epochs and the losses.
        self.loader = ShareLoader(self.setup.train, self.config.workers, pins_memory)
        self.checkpoints = Checkpointing(self.config, self.setup.path)
        self.summary = self.earlier.summary

    @property
    def owns_files(self) -> bool:
        """Whether this rank writes the run folder."""
        return not isinstance(self.setup.folder, NoFolder)

    @property
    def is_finished(self) -> bool:
        """Whether an earlier job has finished the run."""
        return self.earlier.is_finished

    def failures(self) -> list[dict[str, Any]]:
        """Return the losses that the run has survived, in this job and earlier ones."""
        metadata = self.earlier.metadata
        earlier = metadata.failures if metadata is not None else []
        return earlier + describe_losses(self.membership.losses)

    def metadata(self, world: World, batch_sizes: list[int]) -> RunMetadata:
        """Return the metadata to save with the state, for the active ranks and their plan."""
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

    def write_summary(self, **changes: Any) -> None:
        """Change fields of the summary, and write it."""
        self.summary = replace(self.summary, failures=self.failures(), **changes)
        self.setup.folder.write(NAME, self.summary.to_json())

    def close(self) -> None:
        """End the sinks, the loading processes and the claim on the run folder."""
        self.sinks.close(finished=self.summary.finished)
        self.loader.close()
        self.setup.folder.close()
