"""`kaitian-plan`, and mistakes on the command lines of the commands that need no MPI."""

import contextlib
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from mistakes import one_line_error
from unit.report_runs import make_run

from kaitian_mpi.balance import measurements
from kaitian_mpi.balance.communication import AllreduceCost, MeasuredAllreduce
from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.layouts import Prediction
from kaitian_mpi.balance.measurements import MeasuredRank, Measurements, plan_job, read_measurements
from kaitian_mpi.cli import plan, report, supervise
from kaitian_mpi.cli.plan import show
from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.report import page
from kaitian_mpi.observe.report.figures import FIGURES


def bench_rank(rank, kind, alpha, beta, limit=None):
    cost = RankCost(alpha, beta, limit)
    return MeasuredRank(rank, "host", kind, f"{kind}:0", cost, 0.01)


MEASURED = Measurements(
    model="mobilenetv2",
    emulated=True,
    gradient_bytes=9_400_000,
    global_batch_size=256,
    ranks=(
        bench_rank(0, "gpu", 0.004, 0.0008), bench_rank(1, "gpu", 0.004, 0.0008),
        bench_rank(2, "mlu", 0.012, 0.0025, 64), bench_rank(3, "mlu", 0.012, 0.0025),
    ),
    allreduces=(
        MeasuredAllreduce({"gpu": 2}, AllreduceCost(2e-4, 2e-10)),
        MeasuredAllreduce({"mlu": 2}, AllreduceCost(2e-4, 3e-10)),
        MeasuredAllreduce({"gpu": 2, "mlu": 2}, AllreduceCost(5e-4, 8e-10)),
    ),
)  # fmt: skip


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(MEASURED.to_json()))
    return path


@pytest.fixture
def run(path, monkeypatch, capfd):
    """Run the command on the file; return its output."""

    def run_command(*options, path=path):
        monkeypatch.setattr(sys, "argv", ["kaitian-plan", str(path), *options])
        with contextlib.suppress(SystemExit):
            plan.main()
        out, err = capfd.readouterr()
        assert err == ""
        return out

    return run_command


def test_a_file_is_read_as_it_was_written_or_named_in_an_error(path, tmp_path):
    assert read_measurements(path) == MEASURED
    for place, said in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UserError, match=f"cannot be read .{said}.*name a file saved with"):
            read_measurements(place)
    others = b'{"version": 1, "mod', b"\xff\xfe", b"[" * 100_000
    for content in (*others, *b' [] 5 "bench" {}'.split(b" ")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"is not a valid file .* again with kaitian-plan"):
            read_measurements(path)


RANK, LINK = ("ranks", 2), ("allreduces", 2)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("version",), 1, "another version of kaitian-mpi"),
        (("model",), "a\x1b[2J", "unprintable"),
        (("model",), 5, "AttributeError"),
        (("gradient_bytes",), 10**18, "gradient_bytes is 10+"),
        (("global_batch_size",), 0, "global_batch_size is 0"),
        (("ranks",), [], "no ranks"),
        (("ranks",), {"a": 1}, "TypeError"),
        (RANK, 5, "TypeError"),
        ((*RANK, "kind"), ["gpu"], "TypeError"),
        ((*RANK, "cost", "alpha_sec"), -0.1, "alpha_sec is -0.1"),
        ((*RANK, "cost", "alpha_sec"), float("nan"), "alpha_sec is nan"),
        ((*RANK, "cost", "alpha_sec"), "0.1", "alpha_sec is "),
        ((*RANK, "cost", "beta_sec"), 0, "beta_sec is 0"),
        ((*RANK, "cost", "largest_micro_batch"), 0, "largest_micro_batch is 0"),
        ((*RANK, "cost"), {"alpha_sec": 1.0}, "missing 1 required .*beta_sec"),
        (("allreduces",), None, "TypeError"),
        ((*LINK, "ranks_per_kind"), {"npu": 2}, "ranks_per_kind is 2"),
        ((*LINK, "ranks_per_kind"), {"gpu": 3}, "ranks_per_kind is 3"),
        ((*LINK, "cost", "latency_sec"), -1, "latency_sec is -1"),
        ((*LINK, "cost", "sec_per_byte"), float("inf"), "sec_per_byte is inf"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_it(path, place, value, said):
    content = json.loads(path.read_text())
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(content))
    with one_line_error(said) as error:
        read_measurements(path)
    assert str(error.value).isprintable()
    assert str(error.value).endswith("save it again with kaitian-plan --save")


def test_the_measured_world_is_forecast_and_others(run):
    shown = run()
    subsets = plan_job(MEASURED, None)
    assert list(subsets.forecasts) == [("gpu",), ("mlu",), ("gpu", "mlu")]
    whole = subsets.whole
    assert sum(share.ranks * share.samples for share in whole.shares) == 256
    assert whole.step_sec == pytest.approx(whole.compute_sec + whole.exposed_sec)
    assert whole.samples_per_sec == pytest.approx(256 / whole.step_sec)
    for text in (
        "4 measured ranks (devices or their speed emulated)",
        "global batch: 256 samples",
        f"{whole.samples_per_sec:,.0f} samples/s, efficiency {whole.efficiency:.0%}",
        *("gpu: with gpu ", "mlu: with mlu ", "best: gpu + mlu, "),
    ):
        assert text in shown
    for options, said in (
        ("--world 8xgpu,16xmlu", ["global batch: 1,536 samples", "world: 24 ranks"]),  # it grows
        ("--world 2xgpu --global-batch-size 1000", ["global batch: 1,000 samples"]),
        (
            "--world 8xgpu,16xmlu --global-batch-size 5",
            ["gpu 8 0 to 1 4.80 3", "mlu 16 0 0.00 16"],  # with ranks without a sample
        ),
        ("--help", ["--world LIST"]),
    ):
        lines = "\n".join(" ".join(line.split()) for line in run(*options.split()).splitlines())
        assert all(text in lines for text in said)


def test_kinds_measured_only_among_more_are_forecast_with_a_note(run, tmp_path):
    path = tmp_path / "all.json"
    path.write_text(json.dumps(replace(MEASURED, allreduces=MEASURED.allreduces[2:]).to_json()))
    assert "measured only among more" not in run(path=path)
    ranks = (*MEASURED.ranks, bench_rank(4, "npu", 0.01, 0.001))
    every = MeasuredAllreduce({"gpu": 2, "mlu": 2, "npu": 1}, AllreduceCost(5e-4, 8e-10))
    path.write_text(json.dumps(replace(MEASURED, ranks=ranks, allreduces=(every,)).to_json()))
    shown = run("--world", "2xgpu,2xmlu", path=path)
    assert "note: some of these kinds were measured only among more" in shown


@pytest.mark.serial
def test_a_hundred_thousand_ranks_are_forecast_without_torch_or_mpi(path):
    script = (
        "import sys; from kaitian_mpi.cli.plan import main; main(); "
        "sys.exit(3 if {'torch', 'mpi4py'} & sys.modules.keys() else 0)"
    )
    command = [sys.executable, "-c", script, str(path), "--world", "60000xgpu,40000xmlu"]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "world: 100,000 ranks" in done.stdout
    assert time.monotonic() - began < 60  # of 1 s on a machine that has nothing else to do


WORLDS = "gpu", "2gpu", "0xgpu", "2xgpu,", "٣xgpu", "9999999999xgpu", "2xgpu,3xgpu"
MISTAKES = {
    plan: [
        *((f"--world={world}", "write it like 8xcuda,32xcpu") for world in ("", *WORLDS)),
        ("--world 90000xgpu,10001xmlu", "write it like 8xcuda,32xcpu"),
        ("--world 2xnpu", "kind 'npu' was not measured, only gpu, mlu"),
        ("--global-batch-size 0", "must be a whole number, at least 1"),
        ("--global-batch-size x", "invalid int value: 'x'"),
        ("--model cnn", "--model cannot be combined with"),
        ("--set check_every=3", "--check-every cannot be combined with"),
        ("--save again.json", "--save cannot be combined with"),
        ("--wrold 2xgpu", "unrecognized arguments: --wrold"),
    ],
    report: [
        ("{tmp}", "not the folder of a run"),
        ("{tmp}/none", "no such folder"),
        ("{run} -o {tmp}/none/x.html", "(No such file or directory); name another"),
        ("{run} -o {tmp}", "Is a directory"),
        ("{run} --images {run}/config.json", "--images"),
        ("", "RUN_DIR"),
    ],
    supervise: [
        ("mpirun -np 2 python x.py", "the command must start kaitian-train"),
        ("mpirun kaitian-train --epochs -1", "--epochs must be a whole number"),
        ("mpirun kaitian-train --wrong", "unrecognized arguments: --wrong; see kaitian-train"),
        ("mpirun --hostfile no kaitian-train", "no is not a regular file"),
        ("mpirun --host a,-oX kaitian-train", "--host: '-oX' is not a host name"),
        ("--max-restarts -1 mpirun kaitian-train", "--max-restarts must be at least 0"),
        ("--probe-seconds nan mpirun kaitian-train", "--probe-seconds must be above 0"),
        ("--hang-seconds -1 mpirun kaitian-train", "--hang-seconds must be at least 0"),
        ("--wrong mpirun kaitian-train", "unrecognized arguments: --wrong; see kaitian-supervise"),
    ],
}
CASES = [
    pytest.param(command, *case, id=f"{command.PROGRAM} {case[0]}")
    for command, cases in MISTAKES.items()
    for case in cases
]


@pytest.mark.parametrize(("command", "words", "said"), CASES)
def test_a_mistake_is_one_line_with_code_2(tmp_path, monkeypatch, capfd, command, words, said):
    monkeypatch.setattr(supervise, "configure_logging", lambda *_: None)  # it is the process's
    words = words.format(tmp=tmp_path, run=tmp_path / "run").split()
    if command is plan:
        (tmp_path / "measured.json").write_text(json.dumps(MEASURED.to_json()))
        words.insert(0, str(tmp_path / "measured.json"))
    elif command is report:
        make_run(tmp_path / "run")
        for module in (page, report):  # to draw all takes seconds
            monkeypatch.setattr(module, "FIGURES", FIGURES[-1:])
    monkeypatch.setattr(sys, "argv", [command.PROGRAM, *words])
    with pytest.raises(SystemExit) as ended:
        command.main()
    out, err = capfd.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"{command.PROGRAM}: error: ")
    assert said in err


def test_the_layouts_are_compared_at_the_step_that_is_forecast(monkeypatch, capfd):
    """Their times come from single layers, whose sum is not quite a measured step."""
    predictions = [Prediction("replicate", 2.0), Prediction("shard", 1.0), Prediction("pipeline")]
    monkeypatch.setattr(measurements, "predict_layouts", lambda job: predictions)
    layouts = SimpleNamespace(in_world=lambda *args: None)
    measured = replace(MEASURED, layouts=layouts)
    job = plan_job(measured, None, None)
    step_sec = job.whole.step_sec
    compared = [each.step_sec for each in measurements.predict_world(measured, job)]
    assert compared == [pytest.approx(step_sec), pytest.approx(step_sec / 2), None]
    show(measured, job)
    shown = capfd.readouterr().out
    step = float(re.search(r"step: ([\d.]+) ms", shown)[1])
    assert re.search(rf"replicate +{step:.1f} ", shown), shown
