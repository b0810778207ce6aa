"""`kaitian-report`: what it reads, however damaged, what a terminal shows, and its files."""

import json
import sys
from types import SimpleNamespace

import pytest
from unit.report_runs import START, event, make_run, reading, write_json, write_lines

from kaitian_mpi.cli import report
from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.report import page
from kaitian_mpi.observe.report.figures import FIGURES
from kaitian_mpi.observe.report.run_files import MAX_POINTS, read_run
from kaitian_mpi.observe.report.text import side_by_side


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command with one figure; return its exit code, its output and its errors."""
    for module in (page, report):
        monkeypatch.setattr(module, "FIGURES", FIGURES[-1:])

    def run_command(*arguments):
        monkeypatch.setattr(sys, "argv", ["kaitian-report", *map(str, arguments)])
        try:
            report.main()
            code = 0
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run_command


def test_a_page_is_written_for_a_run_or_several_and_missing_files_are_reported(
    run, tmp_path, monkeypatch
):
    folder = make_run(tmp_path / "run")
    before = {path.name for path in folder.iterdir()}
    assert run(folder) == (0, f"report in {folder}/report.html\n", "")
    assert {path.name for path in folder.iterdir()} - before == {"report.html"}
    (folder / "summary.json").write_text("{")
    code, _, err = run(folder)
    assert (code, err) == (0, f"{folder}: summary.json cannot be read: not valid JSON\n")
    assert "summary.json cannot be read" in (folder / "report.html").read_text()
    monkeypatch.chdir(tmp_path)
    folders = [make_run(tmp_path / "fast"), make_run(tmp_path / "slow")]
    found = run(*folders, "--images", "images")
    assert found == (0, "report in report.html, images in images\n", "")
    text = (tmp_path / "report.html").read_text()
    assert text.count("<img ") == 2
    assert "<td>slow (emulated)</td><td>finished</td><td>640</td><td>1</td>" in text
    images = {path.name for path in (tmp_path / "images").iterdir()}
    assert images == {"run1-events.png", "run2-events.png"}
    assert not (folders[0] / "report.html").exists()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(folders[0])
    assert (code, err.count("\n"), "kaitian-mpi[report]" in err) == (2, 1, True)


@pytest.mark.parametrize("end", ["the run finishes", "Ctrl-C"])
def test_a_watched_page_reloads_itself_until_the_end(run, tmp_path, monkeypatch, end):
    folder = make_run(tmp_path / "run")
    finished = (folder / "summary.json").read_text()
    (folder / "summary.json").write_text("{}")
    refresh, looks = '<meta http-equiv="refresh" content="10">', []

    def sleep(seconds):
        looks.append((folder / "report.html").read_text())
        if len(looks) == 2:
            if end == "Ctrl-C":
                raise KeyboardInterrupt
            (folder / "summary.json").write_text(finished)

    monkeypatch.setattr(report, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(report.os, "nice", lambda more: None)
    code, out, _ = run(folder, "--watch")
    assert (code, out.splitlines()[-1]) == (0, f"report in {folder}/report.html")
    assert [refresh in page for page in looks] == [True, True]
    assert refresh not in (folder / "report.html").read_text()


def show(*folders):
    return side_by_side([read_run(folder) for folder in folders])


@pytest.fixture
def two(tmp_path):
    """Write a run with equal batches, and one that is 1.5 times as fast."""
    folders = make_run(tmp_path / "equal"), make_run(tmp_path / "adaptive")
    for folder, name, change in (
        (folders[0], "config.json", {"balance": "off"}),
        (folders[1], "summary.json", {"samples_per_sec": 960.0}),
    ):
        write_json(folder / name, json.loads((folder / name).read_text()) | change)
    return folders


def test_two_runs_are_compared_and_each_rank_has_its_batch_size_and_how_busy_it_was(
    two, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["kaitian-report", "--text", *map(str, two)])
    report.main()
    head, equal, adaptive, verdict, _, *rest = capsys.readouterr().out.splitlines()
    assert head.split() == ["balance", "samples/s", "held-out", "accuracy"]
    assert equal.split() == ["equal", "off", "640", "#" * 13, "0.8"]
    assert adaptive.split() == ["adaptive", "adaptive", "960", "#" * 20, "0.8"]
    assert verdict == "adaptive: 1.50 times the rate of equal (emulated devices)"
    assert rest[:2] == [
        "equal: finished, emulated devices",
        "  640 samples/s, 200 steps in 0:20, held-out loss 0.2, held-out accuracy 0.8",
    ]
    rows = [line.split() for line in rest[3:6]]
    # Rank 3 was lost, so it has no batch any more.
    assert [row[:3] for row in rows] == [["0", "gpu", "30"], ["1", "gpu", "12"], ["2", "mlu", "22"]]
    assert {tuple(row[4:]) for row in rows} == {("80", "#" * 16)}
    assert rest[6] == ""


@pytest.mark.parametrize(("spread", "tells"), [(100, True), (400, False)])
def test_runs_whose_rates_vary_more_than_they_differ_are_not_compared(two, spread, tells):
    for folder in two:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        readings = [line for line in lines if "samples_per_sec" in line]
        for number, line in enumerate(readings):
            line["samples_per_sec"] = 640 + spread * (number % 2)
        write_lines(folder / "metrics.jsonl", lines)
    verdict = show(*two).splitlines()[3]
    assert verdict.startswith("adaptive: 1.50 times") == tells
    assert ("the machine is too busy to compare it with equal" in verdict) != tells
    slow = {"forward_time_sec": [0.01] * 4, "backward_time_sec": [0.02] * 4}
    slow = reading(20, step_time_sec=0.3, optimizer_time_sec=[0.0] * 4, **slow)
    write_lines(folder / "metrics.jsonl", [reading(10), slow])
    # Busy for 80% of 10 steps of 100 ms, then for 10% of 10 steps of 300 ms.
    (row,) = [line for line in show(folder).splitlines() if " 0  gpu" in line]
    assert row.split()[4] == f"{(80 * 1 + 10 * 3) / 4:.0f}"


def test_an_unfinished_run_shows_what_is_known_in_lines_that_fit_a_terminal(two, tmp_path):
    names = [two[0].rename(tmp_path / ("x" * 60)), two[1].rename(tmp_path / ("y" * 60))]
    assert max(map(len, show(*names).splitlines())) <= 80
    two = [path.rename(folder) for path, folder in zip(names, two, strict=True)]
    for name in ("summary.json", "events.jsonl", "plan.jsonl"):
        (two[1] / name).unlink()
    text = show(*two)
    assert "adaptive: unfinished, emulated devices" in text
    assert "adaptive: 1.00 times the rate of equal" in text  # from the readings
    # The steps after the last reading count as well, as after Ctrl-C.
    write_json(two[1] / "summary.json", {"steps": 100})
    write_lines(two[1] / "events.jsonl", [event("stop", 271, "step 271 is saved")])
    assert ", 271 steps" in show(two[1])
    assert read_run(two[1]).facts["steps"] == "271"
    for name in ("summary.json", "events.jsonl", "metrics.jsonl"):
        (two[1] / name).unlink()
    text = show(*two)
    assert "times the rate" not in text
    assert text.endswith("adaptive: unfinished, emulated devices")


@pytest.mark.parametrize(
    ("name", "content", "missing"),
    [
        ("metrics.jsonl", '{"step": 5, "time": 9}\n{"step": 10, "lo', "1 of 2 lines"),
        ("metrics.jsonl", '[]\n7\nnull\n"x"\n{"step": "a"}\n{"step": 1}\n', "6 of 6 lines"),
        ("metrics.jsonl", '{"step": 5, "time": 9, "loss": [1]}', "1 of 1 lines"),
        ("metrics.jsonl", "[" * 100_000, "1 of 1 lines"),
        ("metrics.jsonl", "", "has no reading yet"),
        ("metrics.jsonl", "\x00\xff" * 100, "1 of 1 lines"),
        ("summary.json", "{", "summary.json cannot be read: not valid JSON"),
        ("topology.json", "[]", "topology.json cannot be read: not a JSON object"),
        ("plan.jsonl", '{"step": 0', "plan.jsonl: 1 of 1 lines"),
    ],
)
def test_damage_is_reported_and_the_rest_is_read(tmp_path, name, content, missing):
    folder = make_run(tmp_path / "run")
    (folder / name).write_text(content)
    run = read_run(folder)
    assert any(missing in reason for reason in run.missing), run.missing
    assert run.emulated


def test_a_folder_is_read_whole_without_the_time_between_jobs_and_a_long_run_by_its_means(tmp_path):
    folder = make_run(tmp_path / "run")
    run = read_run(folder)
    assert (run.missing, run.state, run.emulated, run.name) == ([], "finished", True, "run")
    assert [rank.kind for rank in run.ranks.values()] == ["gpu", "gpu", "mlu", "mlu"]
    assert [list(plan.batch_sizes) for plan in run.plans] == [[0, 1, 2, 3]] * 2 + [[0, 1, 2]]
    assert run.intervals[-1].phases["forward"] == (0.03, 0.03, 0.03)
    assert run.intervals[-1].at_sec == pytest.approx(20.0)
    assert run.results == {"loss": pytest.approx(0.2), "accuracy": 0.8}
    kinds = {event.kind: event for event in run.events}
    assert kinds["loss"].ranks == (3,)
    assert run.facts["measured allreduce times"] == "striped 2.5 ms, leader 3.1 ms, flat 4.2 ms"
    assert "experts by rank" not in run.facts
    summary = json.loads((folder / "summary.json").read_text())
    experts = {"by_rank": [["0", "2"], [], ["1"]], "token_fractions": [0.5, 0.25, 0.25]}
    summary["experts"] = experts | {"hidden_by_rank": [0.75, None, 0.5]}
    write_json(folder / "summary.json", summary)
    facts = read_run(folder).facts
    assert facts["experts by rank"] == "rank 0: 0, 2; rank 1: none; rank 2: 1"
    assert facts["tokens by expert"] == "0: 50%, 1: 25%, 2: 25%"
    assert facts["exchange of tokens hidden"] == "rank 0: 75%, rank 2: 50%"
    lines = [reading(5), reading(10), reading(15, time=START + 100_003)]
    write_lines(folder / "metrics.jsonl", lines)
    resume = event("resume", 10, "") | {"time": START + 100_000}
    write_lines(folder / "events.jsonl", [resume])
    (folder / "plan.jsonl").unlink()
    first, second, third = (i.at_sec for i in read_run(folder).intervals)
    assert (second - first, third - second) == pytest.approx((0.5, 3.0))
    count, line = 5_000, {"step_time_sec": 0.1, "ranks": [0, 1]}
    lines = [{"step": s, "time": START + s, "loss": float(s), **line} for s in range(1, count + 1)]
    lines[0] |= {"wait_time_sec": [0.3, None]}
    lines[1] |= {"wait_time_sec": [None, 0.1]}
    write_lines(folder / "metrics.jsonl", lines)
    (folder / "events.jsonl").unlink()
    intervals = read_run(folder).intervals
    assert intervals[0].phases["wait"] == (0.3, 0.1)
    assert len(intervals) <= 2 * MAX_POINTS
    assert sum(i.steps for i in intervals) == count
    assert sum(i.loss * i.steps for i in intervals) / count == pytest.approx((count + 1) / 2)


def test_what_is_no_run_is_a_user_error(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, found in (("file", "is a file"), ("empty", "not the folder"), ("no", "no such")):
        with pytest.raises(UserError, match=found):
            read_run(tmp_path / name)
    foreign = r"were not written by kaitian-mpi .*; name the folder"
    for number, contents in enumerate((
        {"config.json": {"epochs": "many"}, "summary.json": {"epochs": 1}},
        *({"topology.json": {"ranks": [7]}}, {"summary.json": {"steps": "x"}}),
        {"benchmark.json": {"allreduce_sec": [1]}},
    )):  # fmt: skip
        (folder := tmp_path / str(number)).mkdir()
        for name, content in contents.items():
            write_json(folder / name, content)
        with pytest.raises(UserError, match=foreign):
            read_run(folder)
