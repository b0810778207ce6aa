"""`kaitian-doctor` under mpirun: one report, whatever happens to a rank."""

import json
from pathlib import Path

import pytest
from jobs import PYTHON, SOON_SEC, summary_of

DOCTOR = (PYTHON, "-m", "kaitian_mpi.cli.doctor")
HANGING = """
import os, time

class Device:
    def __init__(self):
        while os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            time.sleep(1)
        raise OSError("libacme.so: cannot open")
"""


@pytest.mark.thorough
@pytest.mark.any_mpi
def test_a_job_is_examined_and_reported_as_json(mpirun, tmp_path):
    ended = mpirun(3, *DOCTOR, "--json")
    assert ended.seconds < SOON_SEC
    report = json.loads(ended.out)
    assert [facts["rank"] for facts in report["ranks"]] == [0, 1, 2]
    assert {facts["devices"]["chosen"] for facts in report["ranks"]} == {"cpu"}
    assert {facts["mpi"]["size"] for facts in report["ranks"]} == {3}
    assert [facts["storage"] is not None for facts in report["ranks"]] == [True] + 2 * [False]
    assert len(report["links"]) == 3
    assert all(link["latency_us"] > 0 and link["mb_per_sec"] > 0 for link in report["links"])
    assert not report["training_would_fail"]
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_fail_are_named_and_hold_up_no_other(mpirun, tmp_path):
    """A vendor's plug-in hangs on one rank and is broken on the other; no results can be kept."""
    information = tmp_path / "acme-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[kaitian_mpi.devices]\nacme = acme:Device\n")
    (tmp_path / "acme.py").write_text(HANGING)
    words = ("--with-ft", "ulfm", *DOCTOR, "--timeout", "20", "--run-dir", "/proc/runs")
    ended = mpirun(2, *words, PYTHONPATH=str(tmp_path), code=1)
    assert ended.seconds < SOON_SEC
    text = " ".join(ended.out.split())
    assert "the examination of devices failed (rank 1): no answer within 20 s" in text
    assert "OSError: libacme.so: cannot open" in text
    assert "/proc cannot be written" in text
    assert "fault tolerance is on" in text
    assert text.endswith("training would fail")
    assert max(map(len, ended.out.splitlines())) <= 80


def test_a_wrong_flag_is_one_line(mpirun):
    ended = mpirun(2, *DOCTOR, "--timeout", "-1", code=2)
    assert ended.out == ""
    assert ended.err.count("kaitian-doctor: error: --timeout must be") == 1


@pytest.mark.thorough
def test_a_job_trains_and_is_examined_without_what_only_linux_has(mpirun, tmp_path):
    """As on macOS, whose other differences are not tested."""
    without = {"fresh": True, "PYTHONPATH": str(Path(__file__).parents[1] / "without_linux")}
    command = "kaitian-train --model cnn --max-steps 3 --workers 1 --benchmark-seconds 1"
    mpirun(2, *f"{command} --run-dir run".split(), **without)
    assert summary_of(tmp_path)["finished"]
    ended = mpirun(1, "kaitian-doctor", "--json", **without)
    assert "not on this system" not in ended.text
