"""`kaitian-plan`: its file, its output and each of its errors."""

import json
import subprocess
import sys
import time

import pytest

from kaitian_mpi.balance import forecast
from kaitian_mpi.balance.communication import AllreduceCost, MeasuredAllreduce
from kaitian_mpi.balance.cost_model import CostModel
from kaitian_mpi.balance.fastest_split import RankCost
from kaitian_mpi.balance.measurements import MeasuredRank, Measurements, read_measurements
from kaitian_mpi.cli import plan
from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.files import save_json


def bench_rank(rank, kind, alpha, beta, limit=None):
    cost = RankCost(CostModel(alpha, beta), limit)
    return MeasuredRank(rank, "host", kind, f"{kind}:0", cost, 0.01)


MEASURED = Measurements(
    model="mobilenetv2",
    emulated=True,
    gradient_bytes=9_400_000,
    global_batch_size=256,
    ranks=(
        bench_rank(0, "gpu", 0.004, 0.0008),
        bench_rank(1, "gpu", 0.004, 0.0008),
        bench_rank(2, "mlu", 0.012, 0.0025, 64),
        bench_rank(3, "mlu", 0.012, 0.0025),
    ),
    allreduces=(
        MeasuredAllreduce({"gpu": 2}, AllreduceCost(2e-4, 2e-10)),
        MeasuredAllreduce({"mlu": 2}, AllreduceCost(2e-4, 3e-10)),
        MeasuredAllreduce({"gpu": 2, "mlu": 2}, AllreduceCost(5e-4, 8e-10)),
    ),
)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "measured.json"
    save_json(path, MEASURED.to_json())
    return path


@pytest.fixture
def run(path, monkeypatch, capfd):
    """Run the command on the file; return its exit code, its output and its errors."""

    def run_command(*options, path=path):
        monkeypatch.setattr(sys, "argv", ["kaitian-plan", str(path), *options])
        try:
            plan.main()
            code = 0
        except SystemExit as end:
            code = end.code
        return code, *capfd.readouterr()

    return run_command


# The file.


def test_benchmark_file_round_trip(path):
    assert read_measurements(path) == MEASURED
    assert [c.kind for c in MEASURED.cohorts()] == ["gpu", "gpu", "mlu", "mlu"]


def test_unknown_keys_are_ignored(path):
    content = json.loads(path.read_text()) | {"scores": [1.0, 0.5]}
    content["ranks"][0]["memory_format"] = content["allreduce"][0]["algorithm"] = "new"
    path.write_text(json.dumps(content))
    assert read_measurements(path) == MEASURED


def test_values_that_are_not_finite_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_json(tmp_path / "out.json", {"seconds": float("nan")})
    assert not (tmp_path / "out.json").exists()


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"cannot be read .No such file.*name a file saved with"):
        read_measurements(tmp_path / "none.json")
    with pytest.raises(UserError, match="Is a directory"):
        read_measurements(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b'{"version": 1, "mod', b"\xff\xfe", b"[" * 100_000, b"PK\x03\x04", b"9" * 5000],
)
def test_incomplete_json_is_an_error(tmp_path, content):
    path = tmp_path / "measured.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"is not valid JSON .* save it again with kaitian-plan"):
        read_measurements(path)


RANK, LINK = ("ranks", 2), ("allreduce", 2)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("version",), 2, "version: must be 1, which this version"),
        (("version",), True, "version: must be a whole number"),
        (("model",), "", "model: must be printable text"),
        (("model",), "a\x1b[2J", "model: must be printable text"),
        (("emulated",), "no", "emulated: must be true or false"),
        (("gradient_bytes",), -1, "gradient_bytes: must be a whole number from 0"),
        (("gradient_bytes",), 1.5, "gradient_bytes: must be a whole number"),
        (
            ("gradient_bytes",),
            10**18,
            "gradient_bytes: must be a whole number from 0 to .*, not 10+;",
        ),
        (("global_batch_size",), 0, "global_batch_size: must be a whole number from 1"),
        (("global_batch_size",), True, "global_batch_size: must be .*, not True;"),
        (("ranks",), [], "ranks: must be a list with at least one entry"),
        (("ranks",), {"a": 1}, "ranks: must be a list"),
        (RANK, 5, r"ranks.2.: must be a JSON object"),
        ((*RANK, "rank"), 0, "ranks: a rank is listed twice"),
        ((*RANK, "rank"), None, r"ranks.2.: rank: must be a whole number"),
        ((*RANK, "host"), 7, "host: must be printable text"),
        ((*RANK, "kind"), ["gpu"], "kind: must be printable text"),
        ((*RANK, "alpha_sec"), -0.1, "alpha_sec: must be a number from 0 to 1e.09"),
        ((*RANK, "alpha_sec"), float("nan"), "alpha_sec: must be a number"),
        ((*RANK, "alpha_sec"), float("inf"), "alpha_sec: must be a number"),
        ((*RANK, "alpha_sec"), "0.1", "alpha_sec: must be a number"),
        ((*RANK, "alpha_sec"), False, "alpha_sec: must be a number"),
        ((*RANK, "alpha_sec"), 10**400, "alpha_sec: must be a number"),
        ((*RANK, "beta_sec_per_sample"), 1e-320, "must be 0, or at least 1e-12"),
        ((*RANK, "fit_error"), None, "fit_error: must be a number"),
        ((*RANK, "largest_micro_batch"), 0, "largest_micro_batch: must be a whole number"),
        (("allreduce",), None, "allreduce: must be a list"),
        ((*LINK, "ranks_per_kind"), {}, "ranks_per_kind: must be the number of ranks"),
        (
            (*LINK, "ranks_per_kind"),
            {"npu": 2},
            "must be the number of ranks by kind, of gpu, mlu, not .'npu'",
        ),
        ((*LINK, "ranks_per_kind"), {"gpu": 3}, "gpu: must be a whole number from 1 to 2"),
        ((*LINK, "latency_sec"), -1, "latency_sec: must be a number"),
        ((*LINK, "sec_per_byte"), float("nan"), "sec_per_byte: must be a number"),
    ],
)
def test_errors_name_the_wrong_value_and_its_place(path, place, value, said):
    content = json.loads(path.read_text())
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=said) as error:
        read_measurements(path)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("save it again with kaitian-plan --save")


@pytest.mark.parametrize("key", ["version", "ranks", "allreduce", "gradient_bytes"])
def test_errors_name_the_missing_key(path, key):
    content = json.loads(path.read_text())
    del content[key]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"has no key '{key}'; save it again"):
        read_measurements(path)


def test_a_rank_that_takes_no_time_is_an_error(path):
    content = json.loads(path.read_text())
    content["ranks"][1] |= {"alpha_sec": 0, "beta_sec_per_sample": 0.0}
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="must be above 0 because alpha_sec is 0"):
        read_measurements(path)


@pytest.mark.parametrize("content", ["[]", "5", "null", '"bench"'])
def test_json_of_something_else_is_rejected(tmp_path, content):
    path = tmp_path / "measured.json"
    path.write_text(content)
    with pytest.raises(UserError, match="must be a JSON object"):
        read_measurements(path)


# The command.


def test_the_measured_world_is_forecast(run, tmp_path):
    out = tmp_path / "out.json"
    code, shown, errors = run("--world", "2xgpu,2xmlu", "--json", str(out))
    assert (code, errors) == (0, "")
    found = json.loads(out.read_text())
    assert found["world"] == {"gpu": 2, "mlu": 2}
    assert found["global_batch_size"] == 256
    assert found["emulated"] is True
    assert sum(p["ranks"] * p["samples_per_step"] for p in found["plan"]) == 256
    top = found["forecast"]
    assert top["step_sec"] == pytest.approx(top["compute_sec"] + top["exposed_sec"])
    assert top["samples_per_sec"] == pytest.approx(256 / top["step_sec"])
    assert [subset["kinds"] for subset in found["subsets"]] == [["gpu"], ["mlu"], ["gpu", "mlu"]]
    assert found["best"] == ["gpu", "mlu"]
    assert found["notes"] == []
    assert "256 samples (256 on 4 measured ranks)" in shown
    assert "4 measured ranks (devices or their speed emulated)" in shown
    assert f"bottleneck: {top['bottleneck']}" in shown
    assert f"{top['samples_per_sec']:,.0f} samples/s, efficiency {top['efficiency']:.0%}" in shown
    assert "gpu: with gpu " in shown
    assert "mlu: with mlu " in shown
    assert "best: gpu + mlu, " in shown


def test_the_global_batch_grows_with_the_ranks(run, tmp_path):
    out = tmp_path / "out.json"
    assert run("--world", "8xgpu,16xmlu", "--json", str(out))[0] == 0
    found = json.loads(out.read_text())
    assert found["global_batch_size"] == 256 * 24 // 4
    assert [kind["ranks"] for kind in found["kinds"]] == [8, 16]


def test_the_global_batch_can_be_set(run):
    code, shown, _ = run("--world", "2xgpu", "--global-batch-size", "1000")
    assert code == 0
    assert "global batch: 1,000 samples (as given)" in shown
    assert "gpu: with gpu " in shown
    assert ": the only kind" in shown


def test_ranks_without_a_sample_are_counted_by_kind(run):
    code, shown, _ = run("--world", "8xgpu,16xmlu", "--global-batch-size", "5")
    assert code == 0
    rows = [line.split() for line in shown.splitlines() if line.startswith("|")][1:]
    assert rows[0] == "| gpu | 8 | 0 to 1 | 4.80 | 3 of 8 |".split()
    assert rows[1] == "| mlu | 16 | 0 | 0.00 | 16 of 16 |".split()


def test_estimates_are_marked_and_names_printed_verbatim(run, path):
    name = "[/cpu]:mlu:"  # which is markup to the library that prints tables
    content = json.loads(path.read_text())
    content["emulated"] = False
    content["ranks"].append(content["ranks"][3] | {"rank": 4, "kind": name})
    for kinds in ({name: 1}, {name: 1, "gpu": 2}, {name: 1, "mlu": 2}):
        link = {"ranks_per_kind": kinds, "latency_sec": 0.001, "sec_per_byte": 0}
        content["allreduce"].append(link)
    path.write_text(json.dumps(content))
    code, shown, _ = run("--world", f"2xgpu,4x{name}")
    assert code == 0
    assert "emulated" not in shown
    assert f"| {name} |" in shown
    assert f"note: allreduce inside {name} was not measured with two ranks or more" in shown


def test_every_line_fits_the_terminal(run):
    _, shown, _ = run("--world", "50000xgpu,50000xmlu", "--global-batch-size", "70000")
    assert max(len(line) for line in shown.splitlines()) <= 110


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--world", ""], "--world: '' is not a number of ranks"),
        (["--world", "gpu"], "--world: 'gpu' is not a number of ranks"),
        (["--world", "2gpu"], "--world: '2gpu' is not"),
        (["--world", "0xgpu"], "--world: '0xgpu' is not"),
        (["--world=-2xgpu"], "--world: '-2xgpu' is not"),
        (["--world", "2xgpu,"], "--world: '' is not"),
        (["--world", "٣xgpu"], "--world: '٣xgpu' is not"),
        (["--world", "9999999999xgpu"], "--world: '9999999999xgpu' is not"),
        (["--world", "2xgpu,3xgpu"], "--world names gpu twice"),
        (["--world", "2xnpu"], "kind 'npu' was not measured, only gpu, mlu"),
        (["--world", "90000xgpu,10001xmlu"], "has 100,001 ranks; give at most 100,000"),
        (["--world", "2xgpu", "--global-batch-size", "0"], "must be from 1 to 1000000000, not 0"),
        (["--model", "cnn"], "--model cannot be combined with"),
        (["--set", "check_every=3"], "--check-every cannot be combined with"),
        (["--save", "again.json"], "--save cannot be combined with"),
        (["--world", "2xgpu", "--global-batch-size", "x"], "invalid int value: 'x'"),
        (["--world", "2xgpu", "--json", "/proc/none/out"], "cannot be written"),
        (["--world", "2xgpu", "--wrold", "2xgpu"], "unrecognized arguments: --wrold"),
    ],
)
def test_a_wrong_argument_is_a_one_line_error_with_code_2(run, options, said):
    code, shown, errors = run(*options)
    assert code == 2
    assert shown == ""
    assert errors.startswith("kaitian-plan: error: ")
    assert said in errors
    assert errors.count("\n") == 1


def test_a_wrong_file_is_a_one_line_error_with_code_2(run, tmp_path):
    code, _, errors = run("--world", "2xgpu", path=tmp_path / "none.json")
    assert code == 2
    assert errors.count("\n") == 1
    assert "none.json: cannot be read" in errors


def test_help_needs_no_file(run):
    code, shown, _ = run("--help")
    assert code == 0
    assert "--world LIST" in shown


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
    assert "world: 100,000 ranks, 2 kinds" in done.stdout
    assert time.monotonic() - began < 60  # of 1 s on a machine that has nothing else to do


@pytest.mark.parametrize(
    ("kinds", "works"),
    [("cpu", False), ("cpu,cpu", True), ("gpu,mlu", True), ("gpu,gpu,mlu", True)],
)
def test_the_command_that_it_suggests_works(tmp_path, kinds, works):
    """A command that would fail is not suggested."""
    names = kinds.split(",")
    cost = AllreduceCost(1e-5, 1e-9)
    found = Measurements(
        model="m",
        emulated=False,
        gradient_bytes=1000,
        global_batch_size=64,
        ranks=tuple(
            MeasuredRank(rank, "h", kind, "cpu", RankCost(CostModel(1e-3, 1e-4)), 0.0)
            for rank, kind in enumerate(names)
        ),
        allreduces=tuple(
            MeasuredAllreduce({kind: names.count(kind) for kind in subset}, cost)
            for subset in forecast.subsets(tuple(dict.fromkeys(names)))
        ),
    )
    target = tmp_path / "measured.json"
    save_json(target, found.to_json())
    text = plan.advice(target, found)
    if not works:
        assert text == "to forecast a larger job from it, measure two ranks of each kind"
        return
    assert text == f"try kaitian-plan {target} --world 8x{names[0]}"
    assert plan.plan_job(read_measurements(target), {names[0]: 8}).world == {names[0]: 8}
