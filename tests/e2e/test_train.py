"""`kaitian-train` from the command line to the files it writes."""

import html
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import browse
from jobs import PYTHON, read_lines, read_readings, run_alone, run_ranks, summary_of
from trace_rules import check_trace, collectives_of, largest_gap_us, spans_of

from kaitian_mpi.observe.report.figures import FIGURES
from kaitian_mpi.recipes.models import build_model

# Of the package, in a job of one device kind; a bucket's are those from backward to MPI.
AT_MOST = {"modules imported before the first step": 140, "files a step": 35, "files a bucket": 8}
if torch.version.cuda or torch.version.hip:  # a build that knows accelerators: two modules more
    AT_MOST["modules imported before the first step"] += 2
EVENTS = ("start", 0), ("plan", 0), ("evaluation", 6), ("finish", 12)
DRAW = Path(__file__).parents[2] / "docs/draw_timeline.py"
CLOCK_ERROR_US = 20_000  # beside other programs, round trips take long
SUMMARY_KEYS = set(
    "world_size groups global_batch_size batch_sizes steps epochs samples_per_sec step_time_sec "
    "compute_time_sec wait_time_sec val_loss val_accuracy plans failures allreduce device_kinds "
    "emulated finished".split()
)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """Four ranks, two emulated kinds, one of them slower than any other load makes the others."""
    folder = tmp_path_factory.mktemp("emulated")
    ended = run_ranks(
        4,
        *"kaitian-train --model cnn --epochs 2 --run-dir run --log-interval 0".split(),
        *"--emulate-kinds gpu,gpu,mlu,mlu --emulate-slowdown 2:8,3:8".split(),
        *"--benchmark-seconds 0.3 --keep-all --timeline --timeline-every 3".split(),
        cwd=folder,
    )
    return folder / "run", ended


def test_output_shows_groups_leaders_scores_and_progress_once(emulated):
    _, ended = emulated
    assert ended.out.count("4 ranks, 2 groups (device kinds emulated)") == 1
    assert re.findall(r"\| (...) \(emulated\) \| leader", ended.out) == ["gpu", "mlu"]
    assert ended.out.count("| slowed 8x |") == 2
    assert re.search(
        r"epoch 1/2 \| step 6/12 \| loss [\d.]+ \| [\d.]+ samples/s \| \d+:\d\d left", ended.out
    )
    assert re.search(r"allreduce: (flat|leader|striped) \(measured: flat .* ms, ", ended.out)
    assert "Warning" not in ended.text
    assert "\x1b" not in ended.text


@pytest.mark.any_mpi
def test_summary_is_complete(emulated):
    summary = summary_of(emulated[0].parent)
    assert SUMMARY_KEYS <= set(summary)
    assert summary["finished"] is summary["emulated"] is True
    assert summary["groups"] == {"gpu": [0, 1], "mlu": [2, 3]}
    assert (summary["steps"], summary["epochs"]) == (12, 2)
    assert len(summary["compute_time_sec"]) == 4
    for compute, wait in zip(summary["compute_time_sec"], summary["wait_time_sec"], strict=True):
        assert compute > 0 <= wait <= 1.05 * summary["step_time_sec"] - compute


def test_run_folder_has_all_files(emulated):
    folder, _ = emulated
    assert json.loads((folder / "config.json").read_text())["model"] == "cnn"
    topology = json.loads((folder / "topology.json").read_text())
    assert [rank["kind"] for rank in topology["ranks"]] == ["gpu", "gpu", "mlu", "mlu"]
    benchmark = json.loads((folder / "benchmark.json").read_text())
    assert benchmark["emulated"] is True
    for rank in benchmark["ranks"]:
        assert min(rank["alpha_sec"], rank["beta_sec_per_sample"]) >= 0 < rank["memory_bytes"]
    measured = benchmark["allreduce_sec"]
    assert set(measured) >= {"flat", "leader", "striped"}
    chosen = json.loads((folder / "summary.json").read_text())["allreduce"]
    assert chosen == min(measured, key=measured.get)
    plans = read_lines(folder / "plan.jsonl")
    assert plans[0]["step"] == 0
    assert all(sum(plan["batch_sizes"]) == 256 for plan in plans)
    metrics = read_readings(folder)[-1]
    assert {"step_time_sec", "samples_per_sec", "compute_time_sec", "wait_time_sec"} <= set(metrics)
    parity = json.loads((folder / "parity.json").read_text())
    assert parity["agrees"]
    assert {kind["kind"] for kind in parity["kinds"]} == {"gpu", "mlu"}
    assert json.loads((folder / "summary.json").read_text())["parity"]
    losses = [line["loss"] for line in read_readings(folder)]
    assert len(losses) == 12
    assert sum(losses[-2:]) < 0.9 * sum(losses[:2])
    weights = torch.load(folder / "checkpoints" / "model.pt", weights_only=True)
    build_model("cnn", 10).load_state_dict(weights)
    assert all(torch.isfinite(value).all() for value in weights.values())
    assert not list(folder.rglob("*.partial"))


def test_timeline_has_all_ranks_phases_and_collectives(emulated):
    folder, ended = emulated
    trace = json.loads((folder / "timeline.json").read_text())
    check_trace(trace)
    spans = spans_of(trace)
    assert {s["args"]["step"] for s in spans if "step" in s["args"]} == set(range(3, 13, 3))
    for rank in range(4):
        phases = {span["name"] for span in spans if span["pid"] == rank and span["tid"] == 0}
        assert phases >= {
            *("getting a batch", "forward", "backward", "the sum of gradients", "the optimizer"),
            *("reporting the step", "evaluation", "writing the last checkpoint", "the benchmark"),
        }
    collectives = collectives_of(trace)
    for same in collectives.values():
        assert [span["args"]["rank"] for span in same] == [0, 1, 2, 3]
        assert len({span["args"]["bytes"] for span in same}) == 1
        if same[0]["name"] in ("all_reduce", "barrier"):
            assert largest_gap_us(same) < CLOCK_ERROR_US
    sums = [same[0]["args"] for same in collectives.values() if same[0]["name"] == "all_reduce"]
    assert {re.search(r"allreduce: (\w+) \(", ended.out)[1]} <= {args["algorithm"] for args in sums}
    weights = sum(value.numel() for value in build_model("cnn", 10).parameters())
    assert max(args["bytes"] for args in sums) >= 4 * weights
    happened = {event["name"] for event in trace if event["ph"] == "i"}
    assert happened >= {f"{e} (step {n})" for e, n in EVENTS}
    run_alone(PYTHON, DRAW, folder / "timeline.json", "3", folder / "step.png", cwd=folder)
    assert (folder / "step.png").stat().st_size > 10_000
    counters = {(event["name"], event["pid"]) for event in trace if event["ph"] == "C"}
    assert counters >= {("batch size", rank) for rank in range(4)}
    assert "samples/s" in {name for name, _ in counters}


# Tells what a browser makes of the page.
LOOK = """<script>onload = () => {
    const images = [...document.images].map(each => [each.alt, each.naturalWidth]);
    const ranks = document.querySelector('details').textContent;
    const missing = document.querySelectorAll('.missing').length;
    document.body.style.width = '400px';
    document.title = JSON.stringify({images, ranks, missing, width: document.body.scrollWidth});
}</script></body>"""


@pytest.mark.thorough
def test_the_report_of_a_run_opens_in_a_browser(emulated, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="needs the extra 'report'")
    folder, _ = emulated
    page, shown = tmp_path / "report.html", tmp_path / "shown.png"
    ended = run_alone("kaitian-report", str(folder), "-o", str(page), cwd=tmp_path)
    assert ended.err == ""
    screen = (f"--screenshot={shown}", "--window-size=1280,4000", "--hide-scrollbars")
    browse(page.as_uri(), tmp_path / "browser", *screen)
    picture = np.asarray(image.open(shown).convert("RGB"))
    assert picture.shape[1] == 1280
    assert (picture == (0x00, 0x72, 0xB2)).all(axis=2).sum() > 100  # of rank 0
    # The page itself allows no scripts.
    text = page.read_text().replace("default-src 'none'", "script-src 'unsafe-inline'")
    page.write_text(text.replace("</body>", LOOK))
    title = re.search("<title>(.*)</title>", browse(page.as_uri(), tmp_path / "b", "--dump-dom"))
    found = json.loads(html.unescape(title[1]))
    assert len(found["images"]) == len(FIGURES)
    assert all("EMULATED" in alt and width > 0 for alt, width in found["images"])
    assert found["ranks"].startswith("All ranks (4)rankhostkinddevice")
    assert "gpu (emulated)" in found["ranks"]
    assert (found["missing"], found["width"]) == (0, 400)


def test_paper_batch_policy_with_a_slow_rank_bf16_and_a_forced_algorithm(mpirun, tmp_path):
    mpirun(
        3,
        *"kaitian-train --model planted:Paced --max-steps 5 --run-dir run".split(),
        *"--batch-policy paper --emulate-slowdown 2:40".split(),
        *"--batch-size 40 --precision bf16 --schedule constant --label-smoothing 0.1".split(),
        *"--allreduce striped --emulate-kinds a,b,b --memory-format contiguous".split(),
        *"--relay-dtype bf16 --relay-memory-mb 8 --benchmark-seconds 1".split(),
    )
    summary = summary_of(tmp_path)
    assert max(summary["scores"]) == 1
    assert summary["scores"][2] < min(summary["scores"][:2])
    assert max(summary["batch_sizes"]) == 40
    assert summary["global_batch_size"] == sum(summary["batch_sizes"])
    assert summary["batch_sizes"] == [max(1, round(40 * score)) for score in summary["scores"]]
    assert summary["allreduce"] == "striped"
    auto = {"network_allreduce": "auto", "group_by": "auto", "vendor_library": True}
    assert summary["relay"] == {"memory_mb": 8, "dtype": "bf16", **auto}
    assert summary["steps"] == 5
    assert math.isfinite(summary["val_loss"])


def test_equal_batches_with_fp16_workers_and_a_dataset_factory(mpirun, tmp_path):
    (tmp_path / "mycode.py").write_text(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "def data():\n"
        "    x = torch.randn(101, 3, 16, 16)\n"
        "    return TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())\n"
    )
    ended = mpirun(
        2,
        *"kaitian-train --model cnn --dataset mycode:data --epochs 2 --run-dir run".split(),
        *"--global-batch-size 80 --balance off --precision fp16 --workers 1".split(),
    )
    summary = summary_of(tmp_path)
    assert summary["batch_sizes"] == [40, 40]
    assert summary["steps"] == 4  # two an epoch: 80 samples of those for training, then 1
    assert summary["allreduce"] == "direct"
    assert "relay" not in summary
    assert summary["emulated"] is False
    assert "benchmark:" not in ended.out
    assert not (tmp_path / "run" / "timeline.json").exists()


def test_a_task_of_ones_own_is_trained_without_a_script(mpirun, tmp_path):
    (tmp_path / "mytasks.py").write_text(
        "import torch\n"
        "from kaitian_mpi import Task\n"
        "def build(width, lr=1e-3):\n"
        "    x = torch.randn(100, 4)\n"
        "    data = [{'x': row, 'y': row.sum()} for row in x]\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))\n"
        "    def loss(model, batch):\n"
        "        return (model(batch['x'])[:, 0] - batch['y']).square().mean()\n"
        "    def optimizer(model):\n"
        "        return torch.optim.AdamW(model.parameters(), lr=lr)\n"
        "    return Task(model=model, data=data, validation=data, loss=loss, optimizer=optimizer)\n"
    )
    mpirun(
        2,
        *"kaitian-train --task mytasks:build --set width=8 --set lr=3e-2 --epochs 5".split(),
        *"--global-batch-size 20 --benchmark-seconds 0.3 --emulate-slowdown 1:3".split(),
    )
    (folder,) = (tmp_path / "runs").glob("mytasks-build-*")
    config = json.loads((folder / "config.json").read_text())
    assert (config["task"], config["set"]) == ("mytasks:build", {"width": 8, "lr": 0.03})
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["finished"]
    assert summary["steps"] == 25
    assert summary["val_loss"] < 2  # at first it is the data's variance, 4
    weights = torch.load(folder / "checkpoints/model.pt", weights_only=True)
    assert weights["0.weight"].shape == (8, 4)


@pytest.mark.parametrize("what", ["start", "step"])
def test_a_start_imports_few_modules_and_a_step_passes_few_files(tmp_path, what):
    house = Path(__file__).parents[2] / "benchmarks/house.py"
    words = (PYTHON, str(house), "--rank", what)
    ended = run_ranks(2, *words, cwd=tmp_path, fresh=what == "start")
    (counts,) = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    for name in counts.keys() & AT_MOST.keys():
        assert counts[name] <= AT_MOST[name], name
    assert counts.keys() & AT_MOST.keys()


def test_the_example_hostfile_for_one_machine_starts_its_command(tmp_path):
    file = Path(__file__).parents[2] / "hostfiles" / "one-machine.txt"
    (command,) = re.findall(r"^# +(mpirun --hostfile .*)$", file.read_text(), re.M)
    words = command.replace("hostfiles/one-machine.txt", str(file)).split()
    words += "--model cnn --max-steps 1 --balance off --run-dir run".split()
    run_alone(*words, cwd=tmp_path)
    assert summary_of(tmp_path)["world_size"] == 4


def test_help_is_printed_once(mpirun):
    ended = mpirun(2, "kaitian-train", "--help", fresh=True)
    assert ended.out.count("usage: kaitian-train -n N [flags]") == 1
