"""The sinks for other programs, read back by these programs' own libraries, without a network."""

import json
import shutil
import struct
import sys

import pytest
from test_metrics import reading

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.reading import Event, Figures
from kaitian_mpi.observe.run_folder import DiskFolder
from kaitian_mpi.observe.trackers import MlflowSink, TensorBoardSink, WandbSink, check_wandb_login
from kaitian_mpi.runtime.polling import wait_until

BLOCK, WHOLE, LAST = 32768, 1, 4  # of LevelDB's log format


def event(kind, step, text="so it is"):
    return Event(step=step, time=1.5e9, kind=kind, text=text)


def train(sink, steps, epoch=0, losses=None):
    """Give a sink some steps' readings, and what comes at the end of an epoch."""
    for step in steps:
        sink.on_reading(reading(step, epoch=epoch, loss=(losses or {}).get(step, float(step))))
    last = steps[-1]
    sink.on_evaluation(Figures(step=last, epoch=epoch, time=1.5e9, values={"accuracy": last / 10}))
    sink.on_logged(Figures(step=last, epoch=epoch, time=1.5e9, values={"of my own @5": 2.5}))


def scalars_in(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0, "tensors": 0}).Reload()
    by_tag = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    texts = {
        tag: [event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }
    return {tag: [(e.step, e.value) for e in scalars] for tag, scalars in by_tag.items()}, texts


def test_tensorboard_shows_a_run_and_its_resumption_once(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.on_event(event("start", 0))
    train(sink, [1, 2, 3, 4])
    sink.close(False)
    again = TensorBoardSink(tmp_path)
    again.on_event(event("resume", 2, "resuming from step 2"))
    train(again, [3, 4, 5], losses={3: 30.0})
    again.on_event(event("plan", 5, "step 5: new plan"))
    # It is not closed, as its rank is killed; another takes over.
    other = TensorBoardSink(tmp_path)
    train(other, [6])
    other.close(True)
    scalars, texts = scalars_in(tmp_path)
    losses = [(1, 1.0), (2, 2.0), (3, 30.0), (4, 4.0), (5, 5.0), (6, 6.0)]
    assert scalars["loss/train"] == losses
    assert scalars["accuracy/validation"] == [(5, 0.5), (6, pytest.approx(0.6))]
    assert scalars["time/forward/rank_2"] == [(step, 0.5) for step in range(1, 7)]
    assert scalars["logged/of my own @5"] == [(5, 2.5), (6, 2.5)]
    assert texts["events/plan/text_summary"] == ["step 5: new plan"]
    assert texts["events/resume/text_summary"] == ["resuming from step 2"]


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    return DiskFolder(tmp_path / "run")


def rows_in(path):
    """Return the rows of a run that Weights & Biases keeps on disk.

    The file is of LevelDB's log format: a header of 7 bytes, then records in blocks.
    """
    from wandb.proto import wandb_internal_pb2

    content, at, parts, rows = path.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        left = BLOCK - at % BLOCK
        if left < 7:  # no room for the head of a record
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (WHOLE, LAST):
            record, parts = wandb_internal_pb2.Record.FromString(parts), b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                keys = [item.key or ".".join(item.nested_key) for item in items]
                values = [json.loads(item.value_json) for item in items]
                rows.append(dict(zip(keys, values, strict=True)))
    return rows


@pytest.mark.thorough
def test_weights_and_biases_offline(folder):
    hooks = sys.exit, sys.excepthook
    check_wandb_login()  # needs no key
    sink = WandbSink("us/project", {"lr": 0.1}, folder)
    train(sink, [1, 2])
    train(sink, [1, 2, 3])  # as after a loss
    sink.on_event(event("finish", 3))
    sink.close(True)
    assert (sys.exit, sys.excepthook) == hooks
    (kept,) = (folder.path / "wandb").glob("offline-run-*/run-*.wandb")
    # A process of wandb's writes the file; on a busy machine, it may not be done yet.
    assert wait_until(lambda: len(rows_in(kept)) >= 3, 20)
    rows = rows_in(kept)
    assert [row["_step"] for row in rows] == [1, 2, 3]
    assert [row["loss/train"] for row in rows] == [1.0, 2.0, 3.0]
    assert rows[-1]["accuracy/validation"] == 0.3
    run = folder.read("wandb.json")
    assert (run["project"], kept.name) == ("us/project", f"run-{run['id']}.wandb")

    WandbSink("us/project", {"lr": 0.1}, folder).close(False)
    assert folder.read("wandb.json") == run  # the same run
    WandbSink("another", {}, folder).close(False)
    assert folder.read("wandb.json")["id"] != run["id"]


def test_weights_and_biases_never_prompts_for_a_key(monkeypatch, tmp_path):
    import wandb

    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wandb.teardown()  # it has read the environment
    with pytest.raises(UserError, match=r"--wandb: no API key found.*WANDB_MODE=offline"):
        check_wandb_login()
    monkeypatch.setenv("WANDB_BASE_URL", "https://here")
    wandb.teardown()
    (tmp_path / "netrc").write_text("machine here login user password 123\n")
    check_wandb_login()
    wandb.teardown()


def test_mlflow_in_files(folder, tmp_path):
    from mlflow.tracking import MlflowClient

    sink = MlflowSink("mine", {"lr": 0.1, "long": "x" * 9999}, folder)
    train(sink, [1, 2])
    sink.close(False)
    again = MlflowSink("mine", {"lr": 0.2}, folder)
    train(again, [1, 2, 3])
    again.close(True)
    kept = folder.read("mlflow.json")
    assert kept["tracking_uri"] == (tmp_path / "mlruns").as_uri()
    client = MlflowClient(kept["tracking_uri"])
    run = client.get_run(kept["run_id"])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert (run.data.params["lr"], run.data.metrics["logged/of my own _5"]) == ("0.1", 2.5)
    history = client.get_metric_history(kept["run_id"], "loss/train")
    assert [(point.step, point.value) for point in history] == [(1, 1.0), (2, 2.0), (3, 3.0)]

    shutil.rmtree(tmp_path / "mlruns" / run.info.experiment_id / run.info.run_id)  # it is gone
    MlflowSink("mine", {}, folder).close(True)
    assert folder.read("mlflow.json")["run_id"] != kept["run_id"]
