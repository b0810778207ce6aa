"""`kaitian-doctor` where no other rank is needed: examinations, the plan of probes, the report."""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
from facts import rank_facts

from kaitian_mpi.cli.doctor import read_options
from kaitian_mpi.errors import UserError
from kaitian_mpi.preflight import examination
from kaitian_mpi.preflight.checks import judge
from kaitian_mpi.preflight.examination import examine_launcher, result_of, start_stage
from kaitian_mpi.preflight.facts import JobFacts
from kaitian_mpi.preflight.job import choose_pairs
from kaitian_mpi.preflight.probe import examine_storage
from kaitian_mpi.preflight.process import Ended, LimitedProcess
from kaitian_mpi.preflight.report import Report, to_json, to_text
from kaitian_mpi.runtime.mpi_libraries import parse_launcher_version


@pytest.mark.parametrize(
    ("text", "library"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://", "Open MPI 5.0.11"),
        ("HYDRA build details:\n    Version:        4.2.1\n", "MPICH 4.2.1"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build", "Intel MPI 2021.13"),
        ("srun-like 3", ""),
    ],
)  # fmt: skip
def test_a_launcher_is_known_by_its_version(text, library):
    assert parse_launcher_version(text) == library


def test_a_missing_mpirun_is_a_fact(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert examine_launcher(5).path == ""


@pytest.mark.parametrize(
    ("hosts", "pairs"),
    [
        ("a", []),
        ("aaaaaaaa", [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]),
        ("aabbcc", [(0, 2), (0, 4), (2, 4)]),
        ("abcdefghi", [*((n, n + 1) for n in range(8)), (0, 8)]),
    ],
)
def test_the_first_ranks_of_hosts_meet(hosts, pairs):
    assert choose_pairs(hosts) == pairs


def test_writing_leaves_nothing(tmp_path):
    found = examine_storage(str(tmp_path / "runs" / "new"))
    assert found.folder == str(tmp_path)
    assert (found.error, list(tmp_path.iterdir())) == ("", [])
    assert found.free_bytes > 0


@pytest.mark.parametrize("place", ["/proc/runs", "/dev/null/runs", "/dev/null"])
def test_a_folder_that_cannot_be_written_is_named(place):
    found = examine_storage(place)
    assert found.error


def test_a_dangling_link_is_no_folder(tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path / "gone")
    found = examine_storage(str(tmp_path / "runs" / "new"))
    assert found.folder == str(tmp_path / "runs")
    assert found.error


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import os; os.kill(os.getpid(), 11)", "^killed by SIGSEGV$"),
        ("raise OSError('libacme.so: cannot open')", "OSError: libacme.so: cannot open"),
        ("print('noise')", "^no result$"),
        (
            "import sys, time; print('waits', file=sys.stderr); time.sleep(60)",
            "within 1 s; it said: waits",
        ),
    ],
)
def test_an_examination_that_fails_says_why(monkeypatch, body, reason):
    monkeypatch.setattr(examination, "COMMAND", (sys.executable, "-c", body))
    began = time.monotonic()
    assert re.search(reason, result_of(start_stage("devices", 1))[1])
    assert time.monotonic() - began < 50  # less than the 60 s that one sleeps


def test_an_examination_cannot_join_the_job_as_its_rank(monkeypatch):
    monkeypatch.setenv("PMIX_RANK", "1")
    monkeypatch.setenv("PMI_FD", "7")
    show = "import json, os; print(json.dumps([n for n in os.environ if n[:3] in ('PMI',)]))"
    monkeypatch.setattr(examination, "COMMAND", (sys.executable, "-c", show))
    assert result_of(start_stage("devices", 10)) == ([], "")


def test_what_an_examination_prints_is_not_its_result(tmp_path):
    found, fault = result_of(start_stage("run folder", 30, run_dir=str(tmp_path)))
    assert (found["folder"], fault) == (str(tmp_path), "")


def test_a_command_and_its_children_end_at_the_limit(tmp_path):
    pid = tmp_path / "pid"
    process = LimitedProcess(["sh", "-c", f"sleep 60 & echo $! > {pid}; wait"], 1.0)
    assert process.poll() is None
    assert process.wait().code is None
    stat = Path(f"/proc/{pid.read_text().strip()}/stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child lives")


def test_a_command_that_cannot_be_started_has_a_shells_exit_code(tmp_path):
    assert LimitedProcess(["/nowhere/python"], 1.0).wait().code == 127
    assert LimitedProcess([str(tmp_path)], 1.0).wait().code == 126
    assert LimitedProcess(["sh", "-c", "echo a; echo b >&2"], 9.0).wait() == Ended(0, "a\n", "b\n")


def make_report(job, seconds):
    return Report(job, list(judge(job)), seconds)


def report_of(**parts):
    ranks = tuple(rank_facts(rank, f"host-{rank // 4}", **parts) for rank in range(40))
    return make_report(JobFacts(ranks=ranks, missing={40: "has died"}), 1.25)


def test_the_report_fits_80_columns_and_names_the_worst():
    shm = {"shm_free_bytes": 1 << 20}
    text = to_text(report_of(machine=shm, devices={"error": "no such device"}), "0.1.0")
    assert max(map(len, text.splitlines())) <= 80
    assert "41 ranks on 10 hosts, examined in 1.2 s by kaitian-doctor 0.1.0" in text
    assert "problem  ranks           rank 40: has died" in text
    assert text.endswith("41 problems, 1 warning: training would fail")
    assert "... and 8 more ranks" in text
    assert "problem  devices         ... and 8 more; see --json" in text


def test_the_document_is_json_with_an_exit_code():
    report = report_of()
    document = json.loads(json.dumps(to_json(report, "0.1.0", "2026-01-02T03:04:05+0000")))
    assert document["format"] == 2
    assert document["level"] == "problem"
    assert document["training_would_fail"] is True
    assert report.exit_code == 1
    assert len(document["ranks"]) == 40
    assert document["missing"] == {"40": "has died"}
    assert {"check", "level", "found", "advice"} == set(document["checks"][0])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--timeout 0", "--timeout must be above 0"),
        ("--timeout nan", "--timeout must be .*, not nan"),
        ("--timeout soon", "invalid float value"),
        ("--run-dir=", "--run-dir must not be empty"),
        ("--jso", "unrecognized arguments"),
    ],
)
def test_a_wrong_flag_is_one_line(words, reason):
    with pytest.raises(UserError, match=reason):
        read_options(words.split())


def test_an_mpirun_that_fails_says_why(monkeypatch, tmp_path):
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\necho '(Open MPI) 5.0.9'\n[ $1 = --version ] || exit 3\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = examine_launcher(5)
    assert (found.library, found.started) == ("Open MPI 5.0.9", None)
    assert found.error.startswith("exit code 3")
