"""Whether a checkpoint is of this run, and what of its settings may change."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.training.memory_of_run import Memory
from kaitian_mpi.training.resume import check_resumable

THEN = TrainConfig(model="cnn", run_dir="run", lr=0.1)


def check(config=None, **changes):
    memory = Memory(THEN, {}, [], "", [], [], [])
    config = config or TrainConfig(**{**asdict(THEN), **changes})
    check_resumable(config, SimpleNamespace(rank=0), memory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "resnet18"}, "--model: found 'resnet18', needed 'cnn', with which"),
        ({"dataset": "mnist"}, "--dataset: found 'mnist', needed 'digits', with which"),
        ({"val_split": 0.5}, "--val-split: found 0.5, needed 0.2, with which"),
        ({"seed": 1}, "--seed: found 1, needed 0, with which"),
    ],
)
def test_another_run_is_refused(changes, message, capsys):
    with pytest.raises(AgreedError) as error:
        check(**changes)
    assert message in str(error.value)
    assert capsys.readouterr().out == ""


def test_what_may_change_is_said(capsys):
    check(lr=0.2, global_batch_size=128)
    assert capsys.readouterr().out.splitlines() == [
        "--global-batch-size was 256 before, and is 128 from here on",
        "--lr was 0.1 before, and is 0.2 from here on",
    ]


def test_what_does_not_matter_is_not_said(capsys):
    check(
        run_dir="other",
        resume="run/checkpoints/step-00000001.pt",
        snapshots="name",
        emulate_kinds="a,b",
        emulate_slowdown="1:2",
    )
    check()
    assert capsys.readouterr().out == ""


def test_a_setting_that_is_newer_than_the_checkpoint_counts_as_the_same(capsys):
    memory = Memory({"model": "cnn"}, {}, [], "", [], [], [])
    check_resumable(THEN, SimpleNamespace(rank=0), memory)
    assert capsys.readouterr().out == ""
