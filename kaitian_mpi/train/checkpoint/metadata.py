"""A run's metadata, saved with its state: what a job that resumes the run needs to know."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kaitian_mpi.balance.fastest_split import RankCost
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.train.measure.plan import Profile


class RunMetadata:
    """Plain values that are saved with the state. For a rank's place see `RankInfo.place`.

    Attributes:
        config: the settings, by name.
        profiles: the ranks' profiles, by place.
        excluded_places: the places of the ranks without which the job is faster.
        allreduce_algorithm: the algorithm that sums gradients across device kinds.
        active_places: the places of the ranks that train.
        batch_sizes: the batch sizes of these ranks.
        failures: the losses that the run has survived, as in `summary.json`.
        dataset_size: the numbers of training and validation samples; empty if unknown.
    """

    def __init__(
        self,
        config: TrainingConfig | dict[str, Any],
        profiles: dict[str, Profile],
        excluded_places: list[str],
        allreduce_algorithm: str,
        active_places: list[str],
        batch_sizes: list[int],
        failures: list[dict[str, Any]],
        dataset_size: str = "",
    ) -> None:
        self.config = config if isinstance(config, dict) else asdict(config)
        self.profiles = profiles
        self.excluded_places = excluded_places
        self.allreduce_algorithm = allreduce_algorithm
        self.active_places = active_places
        self.batch_sizes = batch_sizes
        self.failures = failures
        self.dataset_size = dataset_size

    def to_json(self) -> dict[str, Any]:
        """Convert to values that JSON can hold."""
        profiles = {
            place: {
                "cost": profile.cost and profile.cost.to_json(),
                "memory_format": profile.memory_format,
                "precision": profile.precision,
            }
            for place, profile in self.profiles.items()
        }
        return {**vars(self), "profiles": profiles}

    @staticmethod
    def from_json(content: dict[str, Any]) -> RunMetadata:
        """Convert back from the result of `to_json`."""
        profiles = {
            place: Profile(
                RankCost.from_json(profile["cost"]) if profile["cost"] else None,
                profile["memory_format"],
                profile["precision"],
            )
            for place, profile in content["profiles"].items()
        }
        return RunMetadata(**{**content, "profiles": profiles})
