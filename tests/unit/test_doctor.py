"""`kaitian-doctor` where no other rank is needed: examinations, the plan of probes, the report."""

import itertools
import json
import os
import sys
import time
from pathlib import Path

import pytest
from facts import rank_facts

from kaitian_mpi.cli.doctor import make_parser, read_options
from kaitian_mpi.errors import UserError
from kaitian_mpi.preflight import examination
from kaitian_mpi.preflight.examination import Stage, StageError, examine_launcher, parse_count, run
from kaitian_mpi.preflight.facts import JobFacts
from kaitian_mpi.preflight.link_probe import plan_rounds
from kaitian_mpi.preflight.report import make_report, to_json, to_text
from kaitian_mpi.preflight.stage_process import examine_storage, file_system, nearest_folder
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


@pytest.mark.parametrize(
    ("text", "count"),
    [('{"size": 2}{"size": 2}', 2), ('{"size": 1}\n{"size": 1}', 1), ("", 0)],
)
def test_the_launchers_ranks_are_counted(text, count):
    assert parse_count(text) == count


def test_a_missing_mpirun_is_a_fact(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert examine_launcher(5).path == ""


def test_an_mpirun_that_fails_says_why(monkeypatch, tmp_path):
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\necho '(Open MPI) 5.0.9'\n[ $1 = --version ] || exit 3\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = examine_launcher(5)
    assert (found.library, found.started) == ("Open MPI 5.0.9", None)
    assert found.error.startswith("exit code 3")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 40])
def test_ranks_of_one_host_meet_pair_by_pair(ranks):
    rounds = plan_rounds(["a"] * ranks)
    assert all(len(pairs) == 1 for pairs in rounds)
    met = list(itertools.chain(*rounds))
    assert len(met) == len(set(met)) == min(6, ranks * (ranks - 1) // 2)
    assert all(0 <= a < b < ranks for a, b in met)


@pytest.mark.parametrize("hosts", [2, 3, 4, 7, 8, 9, 64, 255])
def test_hosts_meet_in_rounds_in_which_each_is_busy_once(hosts):
    by_rank = [f"h{host}" for host in range(hosts) for _ in range(2)]
    rounds = plan_rounds(by_rank)
    assert len(rounds) <= 7
    for pairs in rounds:
        busy = list(itertools.chain(*pairs))
        assert len(busy) == len(set(busy)) >= hosts - 1
        assert all(rank % 2 == 0 for rank in busy)
        assert 0 not in busy or pairs[0][0] == 0  # rank 0 does its own part first
    met = list(itertools.chain(*rounds))
    assert len(met) == len(set(met))
    if hosts <= 8:
        assert len(met) == hosts * (hosts - 1) // 2


def test_writing_leaves_nothing(tmp_path):
    found = examine_storage(str(tmp_path / "runs" / "new"))
    assert found.folder == str(tmp_path)
    assert (found.error, list(tmp_path.iterdir())) == ("", [])
    assert found.write_mb_per_sec > 0
    assert found.free_bytes > 0


@pytest.mark.parametrize("place", ["/proc/runs", "/dev/null/runs", "/dev/null"])
def test_a_folder_that_cannot_be_written_is_named(place):
    found = examine_storage(place)
    assert found.error
    assert found.write_mb_per_sec is None


def test_the_nearest_folder_of_a_dangling_link_is_the_link(tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path / "gone")
    assert nearest_folder(tmp_path / "runs" / "new") == tmp_path / "runs"
    assert examine_storage(str(tmp_path / "runs")).error == "not a directory"


def test_the_file_system_is_that_of_the_longest_mount_point(tmp_path):
    mounts = f"root / ext4 rw 0 0\nx {tmp_path} tmpfs rw 0 0\ny {tmp_path}/a\\040b nfs4 rw 0 0\n"
    assert file_system(tmp_path / "c", mounts) == f"tmpfs on {tmp_path}"
    assert file_system(tmp_path / "a b" / "d", mounts) == f"nfs4 on {tmp_path}/a b"
    assert file_system(tmp_path.parent, mounts) == "ext4 on /"


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
    with pytest.raises(StageError, match=reason):
        Stage("devices").result(time.monotonic() + 1)
    assert time.monotonic() - began < 50  # less than the 60 s that one sleeps


def test_an_examination_cannot_join_the_job_as_its_rank(monkeypatch):
    monkeypatch.setenv("PMIX_RANK", "1")
    monkeypatch.setenv("PMI_FD", "7")
    show = "import json, os; print(json.dumps([n for n in os.environ if n[:3] in ('PMI',)]))"
    monkeypatch.setattr(examination, "COMMAND", (sys.executable, "-c", show))
    assert Stage("devices").result(time.monotonic() + 10) == []


def test_what_an_examination_prints_is_not_its_result(tmp_path):
    found = Stage("run folder", run_dir=str(tmp_path)).result(time.monotonic() + 30)
    assert found["folder"] == str(tmp_path)


def test_a_command_and_its_children_end_at_the_limit(tmp_path):
    pid = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {pid}; wait"
    code, _, _ = run(["sh", "-c", script], 1.0, os.environ)
    assert code is None
    stat = Path(f"/proc/{pid.read_text().strip()}/stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child lives")


def report_of(**parts):
    ranks = tuple(rank_facts(rank, f"host-{rank // 4}", **parts) for rank in range(40))
    return make_report(JobFacts(ranks=ranks, missing={40: "has died"}), 1.25)


def test_the_report_fits_80_columns_and_names_the_worst():
    shm = {"shm_free_bytes": 1 << 20}
    text = to_text(report_of(machine=shm, devices={"error": "no such device"}), "0.1.0")
    assert max(map(len, text.splitlines())) <= 80
    assert "41 ranks on 10 hosts, examined in 1.2 s by kaitian-doctor 0.1.0" in text
    assert "problem  ranks           rank 40: has died" in text
    assert text.endswith("41 problems, 1 warning: training would fail\n")
    assert "... and 8 more ranks" in text
    assert "problem  devices         ... and 8 more; see --json" in text


def test_the_document_is_json_with_an_exit_code():
    report = report_of()
    document = json.loads(json.dumps(to_json(report, "0.1.0", "2026-01-02T03:04:05+0000")))
    assert document["format"] == 1
    assert document["level"] == "problem"
    assert document["training_would_fail"] is True
    assert report.exit_code == 1
    assert len(document["ranks"]) == 40
    assert document["missing"] == {"40": "has died"}
    assert {"check", "level", "found", "advice"} == set(document["checks"][0])


def test_warnings_alone_do_not_fail():
    report = make_report(JobFacts(ranks=(rank_facts(storage={"write_mb_per_sec": 1.0}),)), 0.1)
    assert (report.level, report.exit_code) == ("warning", 0)
    assert to_text(report, "0").endswith("1 warning: training can start\n")


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


def test_the_defaults_are_those_of_training():
    assert vars(make_parser().parse_args([])) == {
        "json": False,
        "hostfile": "",
        "env": "",
        "devices": "auto",
        "share_device": False,
        "run_dir": "runs",
        "timeout": 60.0,
    }
