"""Ranks that die at chosen places in a script: its loop goes on, and ends as if none had died."""

import json

import pytest
from jobs import PLANTED, PYTHON, SURVIVING, forked, run_alone, run_ranks

SCRIPT = str(PLANTED / "planted_survivor.py")
EVERY = list(range(1, 15))


def results_in(folder):
    return {int(path.name): json.loads(path.read_text()) for path in folder.iterdir()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run_alone(PYTHON, SCRIPT, "closed", str(folder), cwd=folder)
    return results_in(folder)[0]


@pytest.fixture
def survivors(tmp_path, undisturbed):
    """Run the script with kills; return what each surviving rank saw, which ended as without."""

    def run(ranks, form, kills, *settings):
        seen = tmp_path / "seen"
        seen.mkdir()
        words = (*SURVIVING, PYTHON, SCRIPT, form, str(seen), *settings)
        ended = run_ranks(ranks, *words, cwd=tmp_path, KILLS=" ".join(kills))
        assert "Traceback" not in ended.text
        results = results_in(seen)
        killed = {int(kill.rpartition(":")[2]) for kill in kills}
        assert set(results) == set(range(ranks)) - killed
        for result in results.values():
            assert result["finished"] is True
            assert result["end"] == pytest.approx(undisturbed["end"], rel=1e-9)
            assert result["weights"] == pytest.approx(undisturbed["weights"], rel=1e-9, abs=1e-12)
        return results

    return run


def test_closed_loop_goes_on_wherever_a_rank_dies(survivors, undisturbed):
    kills = "forward:3:4", "optimizer:6:3", "evaluate:11:0", "ended:14:2"
    (result,) = survivors(5, "closed", kills).values()
    assert result["steps"] == EVERY
    assert result["evaluations"] == pytest.approx(undisturbed["evaluations"], rel=1e-9)
    assert result["ranks"] == [1, 2]
    assert result["lost"] == [[4], [3], [0]]


@pytest.mark.parametrize("killed", [0, 2])
def test_a_script_that_goes_on_without_a_rank_is_not_started_again(tmp_path, undisturbed, killed):
    (tmp_path / "seen").mkdir()
    ranks = forked(["kaitian-run", SCRIPT, "closed", str(tmp_path / "seen")])
    words = ("kaitian-supervise", "mpirun", "-np", "3", *SURVIVING, *ranks)
    ended = run_alone(*words, cwd=tmp_path, fresh=True, KILLS=f"forward:3:{killed}")
    assert "kaitian-supervise: finished after 1 start" in ended.err
    assert len(results_in(tmp_path / "seen")) == 2
    for result in results_in(tmp_path / "seen").values():
        assert result["weights"] == pytest.approx(undisturbed["weights"], rel=1e-9, abs=1e-12)


def test_open_loop_goes_on_wherever_a_rank_dies(survivors, undisturbed):
    kills = "loss:3:4", "optimizer:6:0", "gradient:9:3", "ended:14:1"
    (result,) = survivors(5, "open", kills).values()
    assert result["steps"] == EVERY
    assert result["evaluations"] == pytest.approx(undisturbed["evaluations"], rel=1e-9)
    assert 2 <= result["refused"] <= 3
    assert result["ranks"] == [1, 2]


def test_a_spare_takes_over_and_one_stands_by(survivors):
    results = survivors(5, "closed", ["script:5:1", "ended:14:0"], "spares=2")
    assert results[2]["steps"] == EVERY
    assert results[3]["steps"] == EVERY[5:]
    assert results[4]["steps"] == []
    for result in results.values():
        assert result["ranks"] == [0, 2, 3]
        assert result["lost"] == [[1]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run_alone(PYTHON, SCRIPT, "epochs", str(folder), cwd=folder)
    return results_in(folder)[0]


@pytest.mark.parametrize(
    ("kills", "settings"),
    [
        ("script:3:4 forward:8:3 evaluate:8:0 after:15:2", ()),
        ("script:3:1", ("spares=1",)),
        ("evaluate:8:1", ("spares=1",)),
        ("between:8:1", ("spares=1",)),
        ("after:8:1", ("spares=1",)),
    ],
)
def test_epochs_go_on_wherever_a_rank_dies(tmp_path, whole, kills, settings):
    """Also where a spare takes over between two epochs, in the middle of what is done there."""
    (tmp_path / "seen").mkdir()
    words = (*SURVIVING, PYTHON, SCRIPT, "epochs", str(tmp_path / "seen"), *settings)
    ranks = 3 if settings else 5
    ended = run_ranks(ranks, *words, cwd=tmp_path, KILLS=kills)
    assert "Traceback" not in ended.text
    results = results_in(tmp_path / "seen")
    assert len(results) == ranks - len(kills.split())
    for rank, result in results.items():
        first = 3 if kills.startswith("script") else 7
        assert result["steps"] == (EVERY[first:] if settings and rank == 2 else EVERY)
        count = len(result["evaluations"])
        assert result["evaluations"] == pytest.approx(whole["evaluations"][-count:], rel=1e-9)
        for name in ("weights", "average", "rate", "end"):
            assert result[name] == pytest.approx(whole[name], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("survives", [True, False])
def test_ranks_that_stood_by_take_part_in_what_follows(tmp_path, survives):
    seen = tmp_path / "seen"
    seen.mkdir()
    words, last = SURVIVING * survives, ["lost"] * survives
    script = str(PLANTED / "planted_twice.py")
    ended = run_ranks(3, *words, PYTHON, script, str(seen), *last, cwd=tmp_path, code=2 * survives)
    bad = "the gradients of 2 steps in a row were not finite"
    # Rank 0 is lost by then: the next one speaks.
    assert ended.err.count(f"error: {bad}") == survives, ended.text
    results = results_in(seen)
    assert len(results) == 3
    for rank, result in results.items():
        assert result["standby"] == [[] if rank == 2 else [1, 2, 3, 4, 5], [0, 1], True]
        assert result["all"] == [[1, 2, 3, 4, 5], [0, 1, 2], True]
        assert result["sum"] == 3
        assert result["left"] == results[0]["left"]
        assert result["left"][-1] is False
        assert result["bad"].startswith(bad)
        assert survives or result["raised"] == (False if rank == 2 else "raised")
        assert result["second"].startswith("init() was called with devices=")
