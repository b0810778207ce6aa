"""Whether a checkpoint belongs to this run, and whether the run is finished."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.train.checkpoint.metadata import RunMetadata
from kaitian_mpi.train.checkpoint.resume import FoundCheckpoint, check_resumable, is_over
from kaitian_mpi.train.progress import Progress
from kaitian_mpi.train.resumption import results_until
from kaitian_mpi.train.summary import Summary

THEN = TrainConfig(model="cnn", run_dir="run", lr=0.1)
DATA = "80 + 20 samples"


def check(config=None, found=None, dataset_size=DATA, **changes):
    found = found or FoundCheckpoint(RunMetadata(THEN, {}, [], "", [], [], [], DATA))
    config = config or TrainConfig(**{**asdict(THEN), **changes})
    return check_resumable(config, SimpleNamespace(rank=0, infos=()), found, dataset_size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "resnet18"},
            "--model is 'resnet18', but the checkpoint was made with 'cnn'",
        ),
        ({"dataset": "mnist"}, "--dataset is 'mnist', but the checkpoint was made with 'digits'"),
        ({"val_split": 0.5}, "--val-split is 0.5, but the checkpoint was made with 0.2"),
        ({"seed": 1}, "--seed is 1, but the checkpoint was made with 0"),
        (
            {"dataset_size": "90 + 20 samples"},
            "the dataset has 90 + 20 samples, but the checkpoint was made with 80 + 20 samples;",
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_rejected(changes, message):
    with pytest.raises(AgreedError) as error:
        check(**changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("done", "flags", "over"),
    [
        ({"epoch": 3, "is_done": True}, {"epochs": 3}, True),
        ({"epoch": 3, "is_done": True}, {"epochs": 2}, True),
        ({"epoch": 3, "is_done": True}, {"epochs": 4}, False),
        ({"epoch": 3, "is_done": False}, {"epochs": 3}, False),
        ({"epoch": 1, "step": 9, "is_done": True}, {"epochs": 3, "max_steps": 9}, True),
        ({"epoch": 1, "step": 9, "is_done": True}, {"epochs": 3, "max_steps": 10}, False),
        ({"epoch": 1, "step": 9, "is_done": True}, {"epochs": 3}, False),
    ],
)
def test_a_run_is_over_when_nothing_is_left_to_train_or_evaluate(done, flags, over):
    assert is_over(TrainConfig(**flags), asdict(Progress(0, **done))) is over


def test_results_of_later_steps_belong_to_the_abandoned_run():
    summary = Summary(steps=10, val_loss=0.5)
    assert results_until(10, summary) == results_until(12, summary) == summary
    assert results_until(9, summary) == Summary()
    assert results_until(9, Summary()) == Summary()
    assert results_until(0, Summary.from_json({"steps": "7"})) == Summary()


def test_summary_round_trip():
    summary = Summary(
        finished=True, steps=10, groups={"cpu": [0, 1]}, val_loss=0.5, failures=[], emulated=False
    )
    content = summary.to_json()
    assert content == {
        "finished": True,
        "emulated": False,
        "failures": [],
        "groups": {"cpu": [0, 1]},
        "steps": 10,
        "val_loss": 0.5,
    }
    assert Summary.from_json(content) == summary
    odd = {"finished": 1, "steps": True, "ranks": {}, "val_loss": 2, "of a later version": 3}
    assert Summary.from_json(odd) == Summary(val_loss=2)
