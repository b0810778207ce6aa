"""The effect of every flag that has another value when a run is resumed."""

import re
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from kaitian_mpi.config import TrainConfig, flag_name
from kaitian_mpi.train.checkpoint.resume_rules import (
    INVALIDATES,
    REJECTED,
    SILENT,
    Invalidated,
    compare_flags,
)

THEN = TrainConfig(timeline=True, model="cnn", run_dir="run", resume="auto")
COSTS = {Invalidated.COSTS, Invalidated.EXCLUSION, Invalidated.PLAN}
PLAN = {Invalidated.EXCLUSION, Invalidated.PLAN}

OF_ANOTHER_RUN = {
    "task": "a:b",
    "optimizer": "adamw",
    "model": "resnet18",
    "dataset": "mnist",
    "val_split": 0.5,
    "seed": 1,
}
OF_THE_JOB = {
    "config": "run.toml",
    "data_dir": "moved",
    "devices": "cpu",
    "device_map": "devices.toml",
    "share_device": True,
    "network_interface": "eth0",
    "emulate_kinds": "a,b",
    "export": "model.safetensors",
    "progress": "plain",
    "quiet": True,
    "timeline": False,
    "timeline_every": 7,
    "profile": "0@5",
    "tensorboard": True,
    "wandb": "project",
    "mlflow": "experiment",
    "emulate_slowdown": "1:2",
    "parity": False,
    "resume": "run/checkpoints/step-00000001.pt",
    "run_dir": "other",
    "snapshots": "name",
}
# name: another value, what is determined again, and the end of the log line
APPLIES = {
    "set": ({"lr": 0.1}, COSTS, "; the ranks are benchmarked again"),
    "augment": ("none", set(), ""),
    "workers": (2, set(), ""),
    "global_batch_size": (128, PLAN, ""),
    "batch_policy": ("paper", PLAN, ""),
    "balance": ("static", PLAN, ""),
    "micro_batch_size": (8, COSTS, "; the ranks are benchmarked again"),
    "keep_all": (True, PLAN, ""),
    "allreduce": ("flat", {Invalidated.ALLREDUCE, Invalidated.EXCLUSION}, ""),
    "network_allreduce": ("ring", {Invalidated.ALLREDUCE, Invalidated.EXCLUSION}, ""),
    "wire": ("int8", {Invalidated.ALLREDUCE, Invalidated.EXCLUSION}, ""),
    "group_by": ("kind", {Invalidated.ALLREDUCE, Invalidated.EXCLUSION}, ""),
    "relay_dtype": ("bf16", {Invalidated.ALLREDUCE, Invalidated.EXCLUSION}, ""),
    "relay_memory_mb": (8, set(), ""),
    "epochs": (20, set(), ""),
    "max_steps": (7, set(), ""),
    "lr": (0.2, set(), ""),
    "momentum": (0.5, set(), ""),
    "nesterov": (False, set(), ""),
    "weight_decay": (0.1, set(), ""),
    "clip_norm": (1.0, set(), ""),
    "label_smoothing": (0.1, set(), ""),
    "schedule": ("constant", set(), ""),
    "warmup": (0.5, set(), ""),
    "precision": ("bf16", COSTS, "; the ranks are benchmarked again"),
    "sync_bn": (True, COSTS, "; the ranks are benchmarked again"),
    "memory_format": ("contiguous", COSTS, "; the ranks are benchmarked again"),
    "max_bad_steps": (5, set(), ""),
    "check_every": (5, set(), ""),
    "checkpoint_every": (5, set(), ""),
    "checkpoint_minutes": (1.0, set(), ""),
    "checkpoint_copy_mb": (5, set(), ""),
    "keep_checkpoints": (5, set(), ""),
    "spares": (1, PLAN, ""),
    "step_timeout": (9.0, set(), ""),
    "snapshot_every": (5, set(), ""),
    "log_interval": (1.0, set(), ""),
    "log_level": ("debug", set(), ""),
}
# name: another value, what is determined again, and why it is ignored
IGNORED = {
    "init": ("other.pt", set(), "the checkpoint has the weights"),
    "batch_size": (32, PLAN, "it is used with --batch-policy paper only"),
    "benchmark_seconds": (3.0, set(), "no rank is benchmarked; all ranks have been"),
    "benchmark_cache": ("cache", set(), "no rank is benchmarked; all ranks have been"),
}


def compare(ranks_are_known=True, then=THEN, **changes):
    return compare_flags(asdict(then), TrainConfig(**asdict(then) | changes), ranks_are_known)


NAMES = {field.name for field in fields(TrainConfig)}


def test_the_table_names_flags_that_exist_and_each_has_a_test():
    assert REJECTED | SILENT | set(INVALIDATES) <= NAMES
    assert not REJECTED & SILENT
    tested = [*OF_ANOTHER_RUN, *OF_THE_JOB, *APPLIES, *IGNORED]
    assert sorted(tested) == sorted(NAMES)


def test_the_documented_table_has_every_flag():
    text = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()
    table = text.partition("| flags | effect |")[2].partition("\n\n")[0]
    for name in NAMES:
        meaning = "the new value applies from there on|the same"
        if name in REJECTED | SILENT:
            meaning = "rejected" if name in REJECTED else "specific to each job"
        rows = [row for row in table.splitlines()[2:] if f"`{flag_name(name)}`" in row]
        assert any(re.search(meaning, row) for row in rows), name


@pytest.mark.parametrize("name", OF_ANOTHER_RUN)
def test_settings_of_another_run_are_rejected(name):
    changes = compare(**{name: OF_ANOTHER_RUN[name]}, lr=0.5)
    flag = "--" + name.replace("_", "-")
    assert changes.rejected.startswith(f"{flag} is {OF_ANOTHER_RUN[name]!r}, but the checkpoint")
    assert "give the same, or another --run-dir" in changes.rejected
    assert not changes.lines


@pytest.mark.parametrize("name", OF_THE_JOB)
def test_settings_of_the_job_may_change_silently(name):
    changes = compare(**{name: OF_THE_JOB[name]})
    assert (changes.rejected, changes.lines, changes.invalidated) == ("", (), set())


@pytest.mark.parametrize("name", APPLIES)
def test_an_applied_change_is_logged_and_renews_what_depends_on_it(name):
    value, invalidated, note = APPLIES[name]
    changes = compare(**{name: value})
    flag, before = "--" + name.replace("_", "-"), getattr(THEN, name)
    assert changes.rejected == ""
    assert changes.lines == (f"{flag} changed from {before!r} to {value!r}{note}",)
    assert changes.invalidated == invalidated


@pytest.mark.parametrize("name", IGNORED)
def test_a_change_without_effect_is_logged_as_ignored(name):
    value, invalidated, why = IGNORED[name]
    changes = compare(**{name: value})
    flag, before = "--" + name.replace("_", "-"), getattr(THEN, name)
    assert changes.lines == (
        f"{flag} changed from {before!r} to {value!r}, which is ignored: {why}",
    )
    assert changes.invalidated == invalidated


def test_changes_that_are_ignored_only_in_some_cases():
    unknown = compare(ranks_are_known=False, benchmark_seconds=3.0)
    assert unknown.lines == ("--benchmark-seconds changed from 10.0 to 3.0",)
    again = compare(precision="bf16", benchmark_seconds=3.0)
    assert "--benchmark-seconds changed from 10.0 to 3.0" in again.lines
    off = TrainConfig(balance="off")
    (line,) = compare(ranks_are_known=False, then=off, benchmark_seconds=3.0).lines
    assert line.endswith("3.0, which is ignored: no rank is benchmarked; --balance off needs none")
    (line,) = compare(then=off, precision="bf16").lines
    assert line.endswith("to 'bf16'")
    paper = TrainConfig(batch_policy="paper")
    (line,) = compare(then=paper, batch_size=32).lines
    assert line == "--batch-size changed from 64 to 32"
    (line,) = compare(then=paper, global_batch_size=32).lines
    assert line.endswith("32, which is ignored: it is used with --batch-policy global only")


def test_no_change_and_a_setting_newer_than_the_checkpoint():
    assert compare() == compare_flags({"model": "cnn"}, THEN, ranks_are_known=True)
    assert compare().lines == ()
