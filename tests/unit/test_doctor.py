"""`kaitian-doctor` where no other rank is needed: examinations, the plan of probes, the report."""

import json
import os
import re
import resource
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from facts import rank_facts

from kaitian_mpi.cli.doctor import read_options
from kaitian_mpi.errors import UserError
from kaitian_mpi.preflight import examination, job, limited_process
from kaitian_mpi.preflight.checks import CHECKS
from kaitian_mpi.preflight.examination import result_of, start_stage
from kaitian_mpi.preflight.facts import JobFacts
from kaitian_mpi.preflight.job_checks import run_checks
from kaitian_mpi.preflight.limited_process import Ended, LimitedProcess, run_all
from kaitian_mpi.preflight.probe import examine_storage
from kaitian_mpi.preflight.report import Report, to_json, to_text
from kaitian_mpi.runtime.polling import wait_until


@contextmanager
def limit(kind, value):
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    yield
    resource.setrlimit(kind, before)


def test_the_first_ranks_of_hosts_meet_and_the_report_fits_80_columns_or_is_json():
    for hosts, pairs in (
        ("a", []),
        ("aaaaaaaa", [[(0, 1)], [(0, 2)], [(0, 3)], [(1, 2)], [(1, 3)], [(2, 3)]]),
        ("aabbcc", [[(0, 2)], [(0, 4)], [(2, 4)]]),
        ("abcdefghi", [[(n, n + 1) for n in range(at, 8, 2)] for at in (0, 1)] + [[(0, 8)]]),
    ):
        assert job.choose_pairs(hosts) == pairs
    shm = {"shm_free_bytes": 1 << 20}
    text = to_text(report_of(machine=shm, devices={"error": "no such device"}), "0.1.0")
    assert max(map(len, text.splitlines())) <= 80
    assert "41 ranks on 10 hosts, examined in 1.2 s by kaitian-doctor 0.1.0" in text
    assert "problem  ranks           rank 40: has died" in text
    assert text.endswith("41 problems, 1 warning: training would fail")
    assert "... and 8 more ranks" in text
    assert "problem  devices         ... and 8 more; see --json" in text
    report = report_of()
    document = json.loads(json.dumps(to_json(report, "0.1.0", "2026-01-02T03:04:05+0000")))
    expected = {"format": 2, "level": "problem", "training_would_fail": True}
    assert (expected | {"missing": {"40": "has died"}}).items() <= document.items()
    assert (report.exit_code, len(document["ranks"])) == (1, 40)
    assert {"check", "level", "found", "advice"} == set(document["checks"][0])
    for words, reason in (
        ("--timeout 0", "--timeout must be above 0"),
        ("--timeout nan", "--timeout must be .*, not nan"),
        ("--timeout soon", "invalid float value"),
        ("--run-dir=", "--run-dir must not be empty"),
        ("--jso", "unrecognized arguments"),
    ):
        with pytest.raises(UserError, match=reason):
            read_options(words.split())


def test_the_run_folder_is_written_to_and_nothing_is_left(tmp_path):
    found = examine_storage(str(tmp_path / "runs" / "new"))
    assert found.folder == str(tmp_path)
    assert (found.error, list(tmp_path.iterdir())) == ("", [])
    assert found.free_bytes > 0
    with limit(resource.RLIMIT_FSIZE, 1 << 20):  # as on a disk that is nearly full
        assert examine_storage(str(tmp_path)).error == "File too large"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for place in ("/proc/runs", "/dev/null/runs", "/dev/null", str(tmp_path / "link" / "new")):
        assert examine_storage(place).error
    assert examine_storage(place).folder == str(tmp_path / "link")


def test_an_examination_that_fails_says_why(monkeypatch):
    waiting = "import sys, time; print('waits', file=sys.stderr); time.sleep(60)"
    for body, limit_sec, reason in (
        ("import os; os.kill(os.getpid(), 11)", 60, "^killed by SIGSEGV$"),
        ("raise OSError('libacme.so: cannot open')", 60, "OSError: libacme.so: cannot open"),
        ("print('noise')", 60, "^no result$"),
        (waiting, 4, "4 s; it said: waits"),
    ):
        monkeypatch.setattr(examination, "COMMAND", (sys.executable, "-c", body))
        assert re.search(reason, result_of(start_stage("devices", limit_sec))[1])


def test_an_examination_is_no_rank_of_the_job_and_what_it_prints_not_its_result(
    monkeypatch, tmp_path
):
    found, fault = result_of(start_stage("storage", 30, run_dir=str(tmp_path)))
    assert (found["folder"], fault) == (str(tmp_path), "")
    monkeypatch.setenv("PMIX_RANK", "1")
    monkeypatch.setenv("PMI_FD", "7")
    show = "import json, os; print(json.dumps([n for n in os.environ if n[:3] in ('PMI',)]))"
    monkeypatch.setattr(examination, "COMMAND", (sys.executable, "-c", show))
    assert result_of(start_stage("devices", 10)) == ([], "")


def test_a_command_ends_at_the_limit_with_what_it_has_started(tmp_path):
    pid = tmp_path / "pid"
    process = LimitedProcess(["sh", "-c", f"sleep 60 & echo $! > {pid}; wait"], 1.0)
    assert process.poll() is None
    assert process.wait().code is None
    stat = Path(f"/proc/{pid.read_text().strip()}/stat")
    assert wait_until(lambda: not stat.exists() or stat.read_text().split()[2] == "Z", 20)


def test_commands_run_in_batches_and_end_with_a_shells_exit_codes(tmp_path, monkeypatch):
    monkeypatch.setattr(limited_process, "MAX_AT_ONCE", 2)
    commands = {f"{number}": ["sh", "-c", "echo a; echo b >&2"] for number in range(20)}
    commands |= {"missing": ["/nowhere/python"], "folder": [str(tmp_path)]}
    with limit(resource.RLIMIT_NOFILE, max(map(int, os.listdir("/proc/self/fd"))) + 16):
        ended = run_all(commands, 20.0)
    assert (list(ended), ended.pop("missing").code) == (list(commands), 127)
    assert (ended.pop("folder").code, set(ended.values())) == (126, {Ended(0, "a\n", "b\n")})


def report_of(**parts):
    ranks = tuple(rank_facts(rank, f"host-{rank // 4}", **parts) for rank in range(40))
    facts = JobFacts(ranks=ranks, missing={40: "has died"})
    return Report(facts, list(run_checks(facts, CHECKS)), 1.25)
