"""The report reads a run's folder, however little of it can be read."""

import pytest
from unit.report_runs import START, make_run, reading, write_json, write_lines

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.report.run_files import MAX_POINTS, read_run


@pytest.fixture
def folder(tmp_path):
    return make_run(tmp_path / "run")


def test_a_complete_folder_is_read(folder):
    run = read_run(folder)
    assert run.missing == []
    assert (run.state, run.emulated, run.name) == ("finished", True, "run")
    assert [rank.kind for rank in run.ranks.values()] == ["gpu", "gpu", "mlu", "mlu"]
    assert [list(plan.batch_sizes) for plan in run.plans] == [[0, 1, 2, 3]] * 2 + [[0, 1, 2]]
    assert run.intervals[-1].phases["forward"] == (0.03, 0.03, 0.03)
    assert run.intervals[-1].at_sec == pytest.approx(20.0)
    assert run.results == {"loss": pytest.approx(0.2), "accuracy": 0.8}
    kinds = {event.kind: event for event in run.events}
    assert kinds["loss"].ranks == (3,)
    assert run.facts["measured allreduce times"] == "striped 2.5 ms, leader 3.1 ms, flat 4.2 ms"


def test_the_time_between_jobs_does_not_count(folder):
    lines = [reading(step) for step in (5, 10)]
    lines.append(reading(15, time=START + 100_003))
    write_lines(folder / "metrics.jsonl", lines)
    resume = {"kind": "resume", "step": 10, "time": START + 100_000, "text": "", "ranks": []}
    write_lines(folder / "events.jsonl", [resume])
    (folder / "plan.jsonl").unlink()
    first, second, third = (i.at_sec for i in read_run(folder).intervals)
    assert second - first == pytest.approx(0.5)
    assert third - second == pytest.approx(3.0)


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
def test_damage_is_reported_and_the_rest_is_read(folder, name, content, missing):
    (folder / name).write_text(content)
    run = read_run(folder)
    assert any(missing in reason for reason in run.missing), run.missing
    assert run.emulated


def test_a_long_run_is_thinned_without_losing_its_means(folder):
    count = 5_000
    line = {"step_time_sec": 0.1, "ranks": [0, 1]}
    lines = [{"step": s, "time": START + s, "loss": float(s), **line} for s in range(1, count + 1)]
    lines[0] |= {"wait_time_sec": [0.3, None]}
    lines[1] |= {"wait_time_sec": [None, 0.1]}
    write_lines(folder / "metrics.jsonl", lines)
    intervals = read_run(folder).intervals
    assert intervals[0].phases["wait"] == (0.3, 0.1)
    assert len(intervals) <= 2 * MAX_POINTS
    assert sum(i.steps for i in intervals) == count
    assert sum(i.loss * i.steps for i in intervals) / count == pytest.approx((count + 1) / 2)


@pytest.mark.parametrize(
    "contents",
    [
        {"config.json": {"epochs": "many"}, "summary.json": {"epochs": 1}},
        {"topology.json": {"ranks": [7]}},
        {"summary.json": {"steps": "x"}},
        {"benchmark.json": {"allreduce_sec": [1]}},
    ],
)
def test_files_of_something_else_are_a_user_error(tmp_path, contents):
    for name, content in contents.items():
        write_json(tmp_path / name, content)
    with pytest.raises(UserError, match=r"are not as kaitian-mpi writes them .*; name the folder"):
        read_run(tmp_path)


def test_a_folder_that_is_not_a_run_is_a_user_error(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, found in (("file", "is a file"), ("empty", "not the folder"), ("no", "no such")):
        with pytest.raises(UserError, match=found):
            read_run(tmp_path / name)
