"""The metadata of a run, saved with its state so that it can be resumed as it was."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kaitian_mpi.balance.optimum import RankCost
from kaitian_mpi.benchmark.plan import Profile
from kaitian_mpi.config import TrainConfig


class RunMetadata:
    """Plain values that are saved with the state.

    Attributes:
        config: the settings, by name.
        profiles: what is known of how ranks compute, by place.
        left_out: the places that the job is faster without.
        algorithm: how gradients cross device kinds.
        crew: the places of the ranks that train.
        batch_sizes: of these.
        failures: the losses that the run has lived through, as in `summary.json`.
        data_set: what tells the data set from others; empty where it is not known.
    """

    def __init__(
        self,
        config: TrainConfig | dict[str, Any],
        profiles: dict[str, Profile],
        left_out: list[str],
        algorithm: str,
        crew: list[str],
        batch_sizes: list[int],
        failures: list[dict[str, Any]],
        data_set: str = "",
    ) -> None:
        self.config = config if isinstance(config, dict) else asdict(config)
        self.profiles = profiles
        self.left_out = left_out
        self.algorithm = algorithm
        self.crew = crew
        self.batch_sizes = batch_sizes
        self.failures = failures
        self.data_set = data_set

    def to_json(self) -> dict[str, Any]:
        """Return it as values that JSON can hold."""
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
        """Return what `to_json` was made from."""
        profiles = {
            place: Profile(
                RankCost.from_json(of_place["cost"]) if of_place["cost"] else None,
                of_place["memory_format"],
                of_place["precision"],
            )
            for place, of_place in content["profiles"].items()
        }
        return RunMetadata(**{**content, "profiles": profiles})
