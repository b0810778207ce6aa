"""What a terminal shows of runs."""

import json
import sys

import pytest
from report_runs import event, make_run, reading, write_json, write_lines

from kaitian_mpi.cli import report
from kaitian_mpi.observe.report.run_files import read_run
from kaitian_mpi.observe.report.text import side_by_side


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


def test_a_busy_share_is_a_mean_over_time(tmp_path):
    folder = make_run(tmp_path / "run")
    slow = reading(20, step_time_sec=0.3, forward_time_sec=[0.01] * 4)
    lines = [reading(10), slow | {"backward_time_sec": [0.02] * 4, "optimizer_time_sec": [0.0] * 4}]
    write_lines(folder / "metrics.jsonl", lines)
    # 80% of 10 steps of 100 ms, then 10% of 10 steps of 300 ms.
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
