"""A run's metadata, saved with its state for a job that resumes the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kaitian_mpi.balance.fastest_split import RankCost
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.train.measure.plan import Profile


@dataclass
class RunMetadata:
    """Plain values that are saved with the state. For a rank's place see `RankInfo.place`."""

    config: Any
    """The settings by name; also made of a `TrainingConfig`."""
    profiles: dict[str, Profile]
    """The ranks' profiles, by place."""
    excluded_places: list[str]
    """The places of the ranks without which the job is faster."""
    allreduce_algorithm: str
    """The algorithm that sums gradients across device kinds."""
    active_places: list[str]
    """The places of the ranks that train."""
    batch_sizes: list[int]
    """The batch sizes of these ranks."""
    failures: list[dict[str, Any]]
    """The losses that the run has survived, as in `summary.json`."""
    dataset_size: str
    """The numbers of training and validation samples."""

    def __post_init__(self) -> None:
        if isinstance(self.config, TrainingConfig):
            self.config = asdict(self.config)

    def to_json(self) -> dict[str, Any]:
        """Convert to values that JSON can hold."""
        profiles = {
            place: {**vars(profile), "cost": profile.cost and profile.cost.to_json()}
            for place, profile in self.profiles.items()
        }
        return {**vars(self), "profiles": profiles}

    @staticmethod
    def from_json(content: dict[str, Any]) -> RunMetadata:
        """Convert back from the result of `to_json`."""
        profiles = {
            place: Profile(**{**profile, "cost": cost and RankCost.from_json(cost)})
            for place, profile in content["profiles"].items()
            for cost in [profile["cost"]]
        }
        return RunMetadata(**{**content, "profiles": profiles})
