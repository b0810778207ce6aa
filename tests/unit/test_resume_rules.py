"""What a job that resumes a run does with flags that have other values, and with its metadata."""

import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from kaitian_mpi.config import TrainConfig, flag_name
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.train.checkpoint.metadata import (
    INVALIDATES,
    REJECTED,
    SILENT,
    Invalidated,
    compare_flags,
)
from kaitian_mpi.train.checkpoint.resume import is_over
from kaitian_mpi.train.progress import Progress
from kaitian_mpi.train.summary import Summary

THEN = TrainConfig(timeline=True, model="cnn", run_dir="run", resume="auto")
NAMES = {field.name for field in fields(TrainConfig)}
OTHER = {
    **{"task": "a:b", "optimizer": "adamw", "model": "resnet18", "dataset": "mnist"},
    **{"val_split": 0.5, "seed": 1, "config": "run.toml", "init": "other.pt", "data_dir": "moved"},
    **{"quiet": True, "resume": "run/checkpoints/step-00000001.pt", "run_dir": "other"},
    **{"snapshots": "name", "lr": 0.2, "epochs": 20, "set": {"lr": 0.1}, "keep_all": True},
    **{"global_batch_size": 128, "precision": "bf16", "allreduce": "flat"},
}


def compare(**changes):
    return compare_flags(asdict(THEN), TrainConfig(**asdict(THEN) | changes))


def test_the_documented_table_has_every_flag():
    assert REJECTED | SILENT | set(INVALIDATES) <= NAMES
    assert not REJECTED & SILENT
    text = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()
    table = text.partition("| flags | effect |")[2].partition("\n\n")[0]
    for name in NAMES:
        meaning = "the new value applies from there on|the same"
        if name in REJECTED | SILENT:
            meaning = "rejected" if name in REJECTED else "specific to each job"
        rows = [row for row in table.splitlines()[2:] if f"`{flag_name(name)}`" in row]
        assert any(re.search(meaning, row) for row in rows), name


@pytest.mark.parametrize("name", OTHER)
def test_a_changed_flag_is_rejected_silent_or_applies_with_a_line(name):
    value, before, flag = OTHER[name], getattr(THEN, name), "--" + name.replace("_", "-")
    if name in REJECTED:
        with pytest.raises(AgreedError, match="give the same, or another --run-dir") as error:
            compare(**{name: value}, lr=0.5)
        made = f"{flag} is {value!r}, but the checkpoint was made with {before!r}"
        assert str(error.value).startswith(made)
        return
    lines, invalidated = compare(**{name: value})
    assert lines == ([] if name in SILENT else [f"{flag} changed from {before!r} to {value!r}"])
    assert invalidated == INVALIDATES.get(name, set())


def test_what_a_changed_flag_invalidates():
    plan = {Invalidated.EXCLUSION, Invalidated.PLAN}
    assert compare(precision="bf16")[1] == {Invalidated.COSTS, *plan}
    assert compare(global_batch_size=128)[1] == plan
    assert compare(allreduce="flat")[1] == {Invalidated.ALLREDUCE, Invalidated.EXCLUSION}
    assert compare() == compare_flags({"model": "cnn"}, THEN) == ([], set())  # of an older version


def test_a_run_is_over_when_nothing_is_left_to_train_or_evaluate():
    for done, flags, over in (
        ({"epoch": 3}, {"epochs": 3}, True),
        ({"epoch": 3}, {"epochs": 2}, True),
        ({"epoch": 3}, {"epochs": 4}, False),
        ({"epoch": 3, "is_done": False}, {"epochs": 3}, False),
        ({"epoch": 1, "step": 9}, {"epochs": 3, "max_steps": 9}, True),
        ({"epoch": 1, "step": 9}, {"epochs": 3, "max_steps": 10}, False),
        ({"epoch": 1, "step": 9}, {"epochs": 3}, False),
    ):
        progress = asdict(Progress(0, **{"is_done": True} | done))
        assert is_over(TrainConfig(**flags), progress) is over


def test_summary_round_trip():
    summary = Summary(
        finished=True, steps=10, groups={"cpu": [0, 1]}, val_loss=0.5, failures=[], emulated=False
    )
    content = summary.to_json()
    assert content == {name: value for name, value in vars(summary).items() if value is not None}
    assert Summary.from_json(content) == summary
    odd = {"finished": 1, "steps": True, "ranks": {}, "val_loss": 2, "of a later version": 3}
    assert Summary.from_json(odd) == Summary(val_loss=2)


def test_a_place_does_not_depend_on_the_rank():
    info = RankInfo(1, 1, "a", "gpu", "cuda:1", "a GPU", 2**30, "2.8")
    assert info.place == replace(info, world_rank=6).place == "a/1/gpu/cuda:1"
    for other in ({"local_rank": 0}, {"host": "b"}, {"kind": "mlu"}, {"device": "cpu"}):
        assert replace(info, **other).place != info.place
