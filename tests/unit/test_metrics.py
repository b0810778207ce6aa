"""What takes the metrics of a run."""

import json
import math
import threading

import pytest

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe import sink as sink_module
from kaitian_mpi.observe.progress import PlainProgress
from kaitian_mpi.observe.reading import Figures, Reading
from kaitian_mpi.observe.run_folder import DiskFolder, NoFolder, RunFolderSink
from kaitian_mpi.observe.sink import MAX_WAITING, BackgroundSink, MetricsSink, Sinks, check_sinks
from kaitian_mpi.observe.trackers import import_tracker
from kaitian_mpi.runtime.polling import wait_until
from kaitian_mpi.train.summary import Summary


def reading(step=7, **others):
    usual = {
        **{"total_steps": 60, "epoch": 1, "epochs": 10, "time": 1.5e9, "loss": 1.23456},
        **{"learning_rate": 0.1, "samples_per_sec": 98.76, "step_time_sec": 2.5},
        **{"seconds_left": 125.4, "ranks": [0, 2], "batch_sizes": [3, 5]},
        "compute_time_sec": [1.0, 2.0],
        "wait_time_sec": [1.5, 0.5],
        "data_time_sec": [0.0, 0.0],
        "forward_time_sec": [0.25, 0.5],
        "backward_time_sec": [0.5, 1.0],
        "optimizer_time_sec": [0.25, 0.5],
    }
    return Reading(step=step, **{**usual, **others})


def test_files_of_a_run_are_valid_json_whatever_diverges(tmp_path):
    folder = DiskFolder(tmp_path)
    RunFolderSink(folder).on_reading(reading(loss=float("nan"), logged={"a": float("-inf")}))
    folder.write("summary.json", {"validation": {"loss": float("nan")}, "val_loss": float("nan")})
    refuse = pytest.fail  # of NaN and Infinity, which are no JSON
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (line["loss"], line["logged"]) == (None, {"a": None})
    content = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    summary = Summary.from_json(content)
    assert math.isnan(summary.validation["loss"])
    assert summary.val_loss is None


class Collecting(MetricsSink):
    def __init__(self):
        self.seen = []

    def on_reading(self, reading):
        self.seen.append(reading)

    on_evaluation = on_logged = on_event = close = on_reading


class Failing(Collecting):
    def on_reading(self, reading):
        super().on_reading(reading)
        raise OSError("no room")


def test_a_failing_sink_is_no_longer_used_also_one_in_the_background(caplog):
    def fail():
        raise RuntimeError("no network\nmore of it")

    failing, good = Failing(), Collecting()
    sinks = Sinks([failing, good])
    for step in (1, 2):
        sinks.on_reading(reading(step))
    for _ in range(2):
        sinks.close(True)
    assert failing.seen[0].step == 1
    assert failing.seen[1:] == [False]  # it is closed once, and gets nothing else
    assert [reading.step for reading in good.seen[:-1]] == [1, 2]
    assert good.seen[-1] is True
    background = BackgroundSink("it", fail)
    assert wait_until(lambda: len(caplog.records) == 2, 60)
    background.on_reading(reading())
    background.close(True)
    ends = "failed and receives no more metrics; training continues:"
    expected = [f"Failing {ends} OSError: no room", f"it {ends} RuntimeError: no network"]
    assert caplog.messages == expected


def test_a_sink_that_fails_in_the_background_is_closed_once(caplog):
    class FailsTwice(Failing):
        def close(self, finished):
            super().close(finished)
            raise OSError("cannot close either")

    for methods, seen in ((["on_reading"], ["a reading", False]), ([], [True])):
        sink = FailsTwice()
        background = BackgroundSink("it", lambda sink=sink: sink)
        for method in methods:
            getattr(background, method)("a reading")
        background.close(True)
        assert sink.seen == seen
    assert [message.rpartition(": ")[2] for message in caplog.messages] == [
        "no room",
        "cannot close either",
    ]


def test_the_run_folder_has_everything_but_forecasts_and_without_one_progress_is_shown(
    tmp_path, capsys
):
    sinks = Sinks([RunFolderSink(DiskFolder(tmp_path))])
    sinks.on_reading(reading(forward_time_sec=None))
    sinks.on_reading(reading(8, logged={"perplexity": 2.0}))
    sinks.on_evaluation(Figures(step=8, epoch=1, time=1.6e9, values={"accuracy": 0.5}))
    sinks.on_logged(Figures(step=8, epoch=2, time=1.7e9, values={"mine": 1.0}))
    sinks.event("loss", 8, "rank 1 is lost", [1], at=1.8e9, remaining=[0, 2])
    read, with_own, evaluation, own = map(
        json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()
    )
    assert {"logged", "epochs", "seconds_left", "forward_time_sec"}.isdisjoint(read)
    expected = {"total_steps": 60, "ranks": [0, 2], "batch_sizes": [3, 5], "time": 1.5e9}
    assert (expected | {"backward_time_sec": [0.5, 1.0]}).items() <= read.items()
    assert with_own["logged"] == {"perplexity": 2.0}
    assert evaluation == {"step": 8, "epoch": 1, "time": 1.6e9, "validation": {"accuracy": 0.5}}
    assert own == {"step": 8, "epoch": 2, "time": 1.7e9, "logged": {"mine": 1.0}}
    assert json.loads((tmp_path / "events.jsonl").read_text()) == {
        **{"step": 8, "time": 1.8e9, "kind": "loss", "text": "rank 1 is lost", "ranks": [1]},
        "details": {"remaining": [0, 2]},
    }
    sinks = Sinks([RunFolderSink(NoFolder()), PlainProgress()])
    sinks.on_reading(reading(logged={"perplexity": 2.0}))
    sinks.event("finish", 7, "finished")
    assert capsys.readouterr().out == (
        "epoch 2/10 | step 7/60 | loss 1.2346 | 98.8 samples/s | 2:05 left | perplexity 2\n"
    )


def test_a_background_sink_gets_all_in_order_and_delays_neither_training_nor_its_end(
    caplog, monkeypatch
):
    began, release = threading.Event(), threading.Event()

    class Blocking(Collecting):
        def on_reading(self, reading):
            began.set()
            release.wait(60)
            super().on_reading(reading)

    sink, blocking = Collecting(), Blocking()
    background = BackgroundSink("it", lambda: sink)
    for step in range(100):
        background.on_reading(reading(step))
    for give in (background.on_evaluation, background.on_logged, background.on_event):
        give(give.__name__)
    background.close(True)
    assert [reading.step for reading in sink.seen[:100]] == list(range(100))
    assert sink.seen[100:] == ["on_evaluation", "on_logged", "on_event", True]
    monkeypatch.setitem(sink_module._PATIENCE_SEC, True, 0.05)
    background = BackgroundSink("it", lambda: blocking)
    background.on_reading(reading(0))
    assert began.wait(60)
    for step in range(1, MAX_WAITING + 11):
        background.on_reading(reading(step))
    background.close(True)
    assert blocking.seen == []  # it still blocks
    release.set()
    assert wait_until(lambda: True in blocking.seen, 60)
    # The oldest of those that waited are dropped; the end waits like them.
    assert [reading.step for reading in blocking.seen[:-1]] == [0, *range(12, MAX_WAITING + 11)]
    assert caplog.messages == [
        "it cannot keep up; its oldest queued metrics are dropped",
        "it did not accept the last metrics within 0 s; they may be missing there",
    ]


def test_a_missing_package_and_what_is_no_sink_are_named():
    missing = r"^--wandb: the package wandb is not installed.*ModuleNotF.*pip install .*\[wandb\]'"
    with pytest.raises(UserError, match=missing):
        import_tracker("wandb", "json.no_such")
    import_tracker("json", "json.decoder")
    check_sinks([Collecting(), MetricsSink()])
    for sink, named in ((Collecting, "the class Coll"), (object(), "object")):
        with pytest.raises(UserError, match=f"not {named}"):
            check_sinks([sink])
