"""The metadata of a run survives a JSON round trip."""

import json

from kaitian_mpi.balance.cost_model import CostModel
from kaitian_mpi.balance.fastest_split import RankCost
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.train.checkpoint.metadata import RunMetadata
from kaitian_mpi.train.measure.plan import Profile

FAILURE = {
    "at": "2026-01-02T03:04:05+0000",
    "ranks": [{"rank": 2, "host": "b", "device": "cpu", "device_kind": "mlu"}],
    "step": 7,
    "seconds_to_recover": 0.25,
}


def make_metadata():
    profiles = {
        "a/0/gpu/cuda:0": Profile(RankCost(CostModel(0.001, 1 / 3), 48), "channels_last", "bf16"),
        "a/1/gpu/cuda:1": Profile(RankCost(CostModel(0.0, 2e-4), None), "contiguous", "fp32"),
        "b/0/mlu/cpu": Profile(None, "channels_last", "fp32"),
    }
    active_places = list(profiles)
    config = TrainConfig(model="cnn", lr=0.3, run_dir="run")
    return RunMetadata(
        config,
        profiles,
        [active_places[2]],
        "leader",
        active_places[:2],
        [100, 156],
        [FAILURE],
        "8 + 2 samples",
    )


def test_json_round_trip():
    metadata = make_metadata()
    text = json.dumps(metadata.to_json())
    other = RunMetadata.from_json(json.loads(text))
    assert vars(other) == vars(metadata)
    assert json.dumps(other.to_json()) == text
    assert other.profiles["a/0/gpu/cuda:0"].cost.model.beta_sec == 1 / 3
    assert other.profiles["a/1/gpu/cuda:1"].cost.largest_micro_batch is None
    assert other.profiles["b/0/mlu/cpu"].cost is None


def test_to_json_does_not_modify_the_metadata():
    metadata = make_metadata()
    metadata.to_json()
    assert isinstance(metadata.profiles["b/0/mlu/cpu"], Profile)
    assert vars(metadata) == vars(make_metadata())


def test_a_place_does_not_depend_on_the_rank():
    infos = [RankInfo(number, 1, "a", "gpu", "cuda:1", "a GPU", 2**30, "2.8") for number in (1, 6)]
    assert infos[0].place == infos[1].place == "a/1/gpu/cuda:1"
    others = [
        RankInfo(1, 0, "a", "gpu", "cuda:1", "a GPU", 2**30, "2.8"),
        RankInfo(1, 1, "b", "gpu", "cuda:1", "a GPU", 2**30, "2.8"),
        RankInfo(1, 1, "a", "mlu", "cuda:1", "a GPU", 2**30, "2.8"),
        RankInfo(1, 1, "a", "gpu", "cpu", "a GPU", 2**30, "2.8"),
    ]
    assert infos[0].place not in [info.place for info in others]
