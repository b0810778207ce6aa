"""Ranks that die at chosen places in a script: its loop goes on, and ends as if none had died."""

import json
import re

import pytest
from jobs import PLANTED, PYTHON, SURVIVING, forked, run_alone, run_ranks

SCRIPT = str(PLANTED / "planted_survivor.py")
EVERY = list(range(1, 15))
FURTHER_EPOCHS = [
    ("script:3:1", 4, ""), ("evaluate:8:1", 8, ""), ("between:8:1", 8, ""), ("after:8:1", 8, ""),
    ("results:15:1", 15, ""), ("between:8:1", 8, "epochs:7"), ("after:8:1", 8, "epochs:7"),
]  # fmt: skip


def results_in(folder):
    return {int(path.name): json.loads(path.read_text()) for path in folder.iterdir()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return what a single rank sees, by the form of its loop and where loops are left."""
    folder, found = tmp_path_factory.mktemp("undisturbed"), {}

    def run(form, leaves="", mixture=""):
        form = "closed" if form == "open" else form
        if (form, leaves, mixture) not in found:
            settings = {"LEAVES": leaves, "MIXTURE": mixture}
            run_alone(PYTHON, SCRIPT, form, str(folder), cwd=folder, **settings)
            found[form, leaves, mixture] = results_in(folder)[0]
        return found[form, leaves, mixture]

    return run


@pytest.fixture
def survivors(tmp_path, undisturbed):
    """Run the script with kills; return what each surviving rank saw, which ended as without."""

    def run(ranks, form, kills, *settings, leaves="", program=PYTHON, supervisor=()):
        seen = tmp_path / "seen"
        seen.mkdir()
        script = forked([program, SCRIPT, form, str(seen), *settings])
        command = (*supervisor, "mpirun", "-np", str(ranks), *SURVIVING, *script)
        mixture = "yes" if "layout=experts" in settings else ""
        variables = {"KILLS": kills, "LEAVES": leaves, "MIXTURE": mixture}
        ended = run_alone(*command, cwd=tmp_path, fresh=True, **variables)
        assert "Traceback" not in ended.text
        assert not supervisor or "kaitian-supervise: finished after 1 start" in ended.err
        results = results_in(seen)
        assert set(results) == set(range(ranks)) - {int(kill[-1]) for kill in kills.split()}
        whole = undisturbed(form, leaves, mixture)
        for result in results.values():
            assert result["finished"] is whole["finished"]
            for name in ("end", "weights", "average", "rate")[: 4 if form == "epochs" else 2]:
                assert result[name] == pytest.approx(whole[name], rel=1e-9, abs=1e-12), name
            missed = len(whole["evaluations"]) - len(result["evaluations"])
            evaluations = whole["evaluations"][missed:]
            assert result["evaluations"] == pytest.approx(evaluations, rel=1e-9)
        return results

    return run


@pytest.mark.parametrize(
    ("form", "kills", "refused", "lost"),
    [
        pytest.param(
            *("closed", "forward:3:4 optimizer:6:3 evaluate:11:0 ended:14:2", [0]),
            [[4], [3], [0]],
            marks=pytest.mark.thorough,
        ),
        ("open", "loss:3:4 optimizer:6:0 gradient:9:3 ended:14:1", [2, 3], [[4], [0], [3]]),
    ],
)
def test_a_loop_goes_on_wherever_a_rank_dies(survivors, undisturbed, form, kills, refused, lost):
    (result,) = survivors(5, form, kills).values()
    assert result["steps"] == EVERY
    assert len(result["evaluations"]) == len(undisturbed(form)["evaluations"])
    assert result["refused"] in refused
    assert (result["ranks"], result["lost"]) == ([1, 2], lost)


@pytest.mark.parametrize(
    ("ranks", "form", "kills", "settings"),
    [
        (3, "closed", "backward:3:2 optimizer:6:0", []),
        pytest.param(
            4, "closed", "optimizer:1:1 script:6:3 evaluate:11:0", [], marks=pytest.mark.thorough
        ),
        pytest.param(
            5,
            "open",
            "loss:3:4 optimizer:6:0 gradient:9:3 ended:14:1",
            [],
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            *(5, "epochs", "forward:8:3 evaluate:8:0 after:15:2", ["spares=1"]),
            marks=pytest.mark.thorough,
        ),
        pytest.param(4, "run", "optimizer:4:2 forward:9:0", [], marks=pytest.mark.thorough),
    ],
)
def test_mirrors_have_a_lost_ranks_part(survivors, ranks, form, kills, settings):
    """A rank dies before, amid and after what others give it and it gives them."""
    for result in survivors(ranks, form, kills, "layout=shard", *settings).values():
        assert result["steps"] in ([] if form == "run" else EVERY, EVERY[7:])


@pytest.mark.parametrize(
    ("ranks", "form", "kills", "settings"),
    [
        (4, "open", "loss:3:3 optimizer:6:0 gradient:9:1", []),
        pytest.param(
            *(4, "closed", "backward:3:1 optimizer:8:0", ["spares=1"]),
            marks=pytest.mark.thorough,
        ),
        pytest.param(3, "closed", "backward:3:2 optimizer:6:0", [], marks=pytest.mark.thorough),
        pytest.param(
            *(4, "closed", "optimizer:1:1 script:6:3 evaluate:11:0", []),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_mirrors_have_a_lost_ranks_experts(survivors, ranks, form, kills, settings):
    """Also while its tokens, and those for its experts, are under way; a spare gets some."""
    results = survivors(ranks, form, kills, "layout=experts", *settings)
    for result in results.values():
        assert result["steps"] in (EVERY, EVERY[2:], EVERY[7:])
    assert not settings or results[3]["steps"] == EVERY[2:]


@pytest.mark.thorough
def test_without_mirrors_the_others_begin_again_before_the_first_step(survivors):
    kills = "backward:1:2"
    for result in survivors(3, "closed", kills, "layout=shard", "mirrors=no").values():
        assert result["steps"] == EVERY


def test_a_message_that_no_rank_receives_does_not_end_the_others(tmp_path):
    script = str(PLANTED / "planted_revoked.py")
    ended = run_alone("mpirun", "-np", "3", *SURVIVING, PYTHON, script, cwd=tmp_path)
    assert all(f"rank {rank} goes on" in ended.out for rank in range(3))


def test_an_owner_and_its_mirror_that_are_lost_at_once_end_the_job(tmp_path):
    (tmp_path / "seen").mkdir()
    script = forked([PYTHON, SCRIPT, "closed", str(tmp_path / "seen"), "layout=shard"])
    command = ("mpirun", "-np", "4", *SURVIVING, *script)
    kills = " ".join(f"forward:3:{rank}" for rank in (0, 1, 2))
    ended = run_alone(*command, cwd=tmp_path, fresh=True, code=None, KILLS=kills)
    # If they die one after another, the last one has all parts.
    assert ended.code == 0 or "there is no checkpoint to continue from" in ended.err, ended.text
    assert "Traceback" not in ended.text
    assert "starting from scratch" not in ended.text


@pytest.mark.parametrize("killed", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_script_that_goes_on_without_a_rank_is_not_started_again(survivors, killed):
    options = {"program": "kaitian-run", "supervisor": ["kaitian-supervise"]}
    assert len(survivors(3, "closed", f"forward:3:{killed}", **options)) == 2


def test_a_request_to_save_and_end_outlives_a_loss(tmp_path):
    """One made just before the loss, and one amid it: the ranks are told at the next step."""
    seen = tmp_path / "seen"
    seen.mkdir()
    asks = " ".join(f"script:5:{rank}=USR2" for rank in range(3))
    words = (*SURVIVING, PYTHON, SCRIPT, "closed", str(seen), "run_dir=run")
    ended = run_ranks(3, *words, cwd=tmp_path, KILLS=f"{asks} forward:6:1")
    saved = int(re.search(r"step (\d+) is saved, and the job ends", ended.text)[1])
    results = results_in(seen)
    assert set(results) == {0, 2}
    for result in results.values():
        assert (result["finished"], result["lost"]) == (False, [[1]])
        assert result["steps"] == list(range(1, saved + 1))
        assert saved < EVERY[-1]


def test_a_signal_amid_a_recovery_saves_the_step_before(tmp_path):
    seen = tmp_path / "seen"
    seen.mkdir()
    words = (*SURVIVING, PYTHON, SCRIPT, "closed", str(seen), "run_dir=run")
    ended = run_ranks(2, *words, cwd=tmp_path, code=None, KILLS="forward:6:1 recovery:6:0=TERM")
    assert 'step 5 is saved: resume="auto" resumes from it' in ended.text


def test_a_spare_takes_over_and_one_stands_by(survivors):
    results = survivors(5, "closed", "script:5:1 ended:14:0", "spares=2")
    assert [results[rank]["steps"] for rank in (2, 3, 4)] == [EVERY, EVERY[5:], []]
    for result in results.values():
        assert (result["ranks"], result["lost"]) == ([0, 2, 3], [[1]])


def test_a_spare_takes_over_in_an_evaluation_after_a_step(survivors):
    results = survivors(3, "closed", "evaluate:7:1", "spares=1")
    assert results[2]["steps"] == EVERY[6:]


@pytest.mark.parametrize(
    ("kills", "first", "leaves"),
    [
        ("script:3:4 forward:8:3 evaluate:8:0 after:15:2", None, ""),
        ("between:8:1 after:8:0", 8, ""),
        pytest.param("after:11:1", 11, "steps:10", marks=pytest.mark.thorough),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in FURTHER_EPOCHS),
    ],
)
def test_epochs_go_on_wherever_a_rank_dies(survivors, undisturbed, kills, first, leaves):
    """Also if a spare takes over between two epochs, amid what is done there, from a first step."""
    ranks, settings = (5, []) if first is None else (3, ["spares=1"])
    steps = undisturbed("epochs", leaves)["steps"]
    for rank, result in survivors(ranks, "epochs", kills, *settings, leaves=leaves).items():
        is_joining = first is not None and rank == 2
        assert result["steps"] == [n for n in steps if not is_joining or n >= first]


def test_a_rank_that_dies_while_a_training_is_made_is_survived(survivors):
    (result,) = survivors(3, "closed", "making:1:1 forward:3:0").values()
    assert (result["steps"], result["lost"]) == (EVERY, [[1], [0]])


def test_the_next_rank_records_an_epoch_that_the_first_has_not(survivors, tmp_path):
    survivors(3, "epochs", "after:8:0", "run_dir=run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    judged = [line["logged"] for line in lines if line.get("logged")]
    assert judged == [{"judged": 7.0}, {"judged": 14.0}]
    assert [line["step"] for line in lines if "validation" in line] == [7, 14]


@pytest.mark.parametrize("survives", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_ranks_that_stood_by_take_part_in_what_follows(tmp_path, survives):
    seen = tmp_path / "seen"
    seen.mkdir()
    words = (*SURVIVING * survives, PYTHON, SCRIPT, "several", str(seen))
    kills = "several:2:0" * survives
    ended = run_ranks(3, *words, cwd=tmp_path, code=2 * survives, KILLS=kills)
    bad = "the gradients of 2 steps in a row were not finite"
    # Rank 0 is lost by then: the next one speaks.
    assert ended.err.count(f"error: {bad}") == survives, ended.text
    results = results_in(seen)
    assert len(results) == 3
    for rank, result in results.items():
        assert result["standby"] == [[] if rank == 2 else EVERY[:7], [0, 1], True]
        assert result["all"] == [EVERY[:7], [0, 1, 2], True]
        assert result["sum"] == 3
        assert result["left"] == results[0]["left"]
        assert result["left"][-1] is False
        assert result["bad"].startswith(bad)
        assert "--" not in result["bad"], "a script has no flags"
        assert survives or result["raised"] == (False if rank == 2 else "planted")
        assert result["second"].startswith("init() was called with devices=")
