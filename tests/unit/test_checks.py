"""Verdicts: which facts are a problem, which a warning, and what the line names."""

import re
import subprocess
from dataclasses import asdict, replace

import pytest
from facts import rank_facts, with_package

from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.observe.console import differing_software
from kaitian_mpi.preflight import job_checks
from kaitian_mpi.preflight.checks import CHECKS
from kaitian_mpi.preflight.facts import (
    JobFacts,
    Kind,
    LinkFacts,
    OtherVersionError,
    RankFacts,
    collect,
)
from kaitian_mpi.preflight.verdict import Level, ranks_text

ACME_KIND = Kind(name="acme", count=2, is_host=False, library="ACL")
ACME = {
    "kinds": (ACME_KIND, Kind(name="cpu", count=8, is_host=True)),
    "chosen": "acme:0",
    "kind": "acme",
    "is_host": False,
}
NAMED = {"requested": "acme:0,acme:0"}
MPIRUN = "/bin/mpirun"


def run_checks(facts):
    return list(job_checks.run_checks(facts, CHECKS))


def job(*ranks, **others):
    return JobFacts(ranks=ranks or (rank_facts(),), **others)


def two(host="b", **parts):
    """Two ranks on two hosts, of which the second differs."""
    return job(rank_facts(0, "a"), rank_facts(1, host, **parts))


def pair(**parts):
    """Two ranks on one host."""
    return job(*(rank_facts(rank, local_size=2, **parts) for rank in range(2)))


def seeing(address):
    return {**ACME, "seen": {"acme": (address,)}}


def link(ranks, speed, error=""):
    hosts = tuple("abcd"[rank] for rank in ranks)
    return LinkFacts(ranks=ranks, hosts=hosts, latency_us=20.0, mb_per_sec=speed, error=error)


def with_devices(**devices):
    return job(rank_facts(devices=devices))


ASKED = {"survives_requested": True}
NO_ACME = {"error": "asks for acme:7, but b has none; name another", "chosen": ""}
PROBLEMS = {
    "a missing package": (job(rank_facts(software=with_package("torch", ""))),
        "not installed: torch"),
    "this package differs": (two(software=with_package("kaitian-mpi", "0.2")),
        "the version of kaitian-mpi differs between ranks: 0.1.0 on rank 0, 0.2 on rank 1"),
    "the messages between ranks differ": (two(software={"protocol": 2}),
        "the wire protocol of kaitian-mpi differs between ranks: 1 on rank 0, 2 on rank 1"),
    "a silent rank": (job(missing={1: "has died", 2: "has died"}), "ranks 1, 2: has died"),
    "a failed examination": (two(faults={"devices": "killed by SIGSEGV"}),
        "the examination of devices failed (rank 1): killed by SIGSEGV"),
    "no MPI": (job(rank_facts(faults={"mpi": "no libmpi; install one"})),
        "MPI cannot be used: no libmpi; install one"),
    "worlds of one rank": (job(rank_facts(mpi={"size": 1, "launched": 4})),
        "the launcher started 4 ranks, but MPI sees 1: mpirun and mpi4py use different MPI"),
    "unknown ranks": (job(rank_facts(mpi={"launched": 1})), "start the job with mpirun"),
    "no threads": (two(mpi={"threads": "single"}),
        "MPI's thread level is single on rank 1, not multiple"),
    "fault tolerance that is not": (job(rank_facts(mpi={**ASKED, "survives": False})),
        "requested, but MPI has none on rank 0"),
    "fault tolerance on one host": (two(mpi=ASKED), "differs between ranks: off on rank 0, on on"),
    "no mpirun": (job(mpirun=""), "there is no mpirun in PATH"),
    "no such device": (two(devices=NO_ACME), f"rank 1: {NO_ACME['error']}"),
    "more ranks than devices": (pair(devices=seeing("02:00")),
        "2 ranks on a, but a has 1 acme; start 1 ranks there"),
    "one device for two ranks": (pair(devices={**ACME, **NAMED, "physical_id": "02:00"}),
        "ranks 0, 1 share the device acme 02:00, which its library refuses; start fewer"),
    "no memory": (with_devices(ram_free_bytes=100 << 20), "100 MiB of 32.0 GiB free for 1 rank"),
    "no shared memory": (job(rank_facts(machine={"shm_free_bytes": 1 << 20}), mpirun=MPIRUN),
        "/dev/shm: 1 MiB of 16.0 GiB free; make room"),
    "a read-only disk": (two(storage={"error": "Read-only file system"}),
        "/runs cannot be written: Read-only file system on b; make room"),
    "a link that is down": (job(links=(link((0, 1), None, "no message arrived within 10 s"),)),
        "between a (rank 0) and b (rank 1): no message arrived within 10 s"),
}  # fmt: skip
WARNINGS = {
    "MPI differs": (two(mpi={"library": "Open MPI 5.0.3"}),
        "library differs between ranks: Open MPI 5.0.11 on rank 0, Open MPI 5.0.3 on rank 1"),
    "too many ranks": (pair(machine={"cores": [0]}), "1 core for 2 ranks; start fewer"),
    "bound ranks": (pair(machine={"launcher_cores": 16}),
        "mpirun lets 2 ranks use 8 of 16 cores; add --bind-to none to the command"),
    "little memory": (with_devices(ram_free_bytes=500 << 20), "500 MiB of"),
    "little shared memory": (two(machine={"shm_free_bytes": 60 << 20, "shm_bytes": 64 << 20}),
        "/dev/shm: 60 MiB of 64 MiB free on b; make room"),
    "no /dev/shm": (job(rank_facts(machine={"shm_bytes": None, "shm_free_bytes": None})), "mount"),
    "few files": (job(rank_facts(machine={"open_files": 256})), "256 open files, a job of 2 rank"),
    "a plug-in that does not open": (with_devices(faults={"acme": "no acme; update it"}),
        "no acme"),
    "libraries that one rank declines": (
        job(rank_facts(devices=ACME), rank_facts(1, devices={**ACME, "vendor_library": False})),
        "ACL is not used, by --no-vendor-library or KAITIAN_VENDOR_LIBRARY=0 on rank 1: groups"),
    "an idle driver": (with_devices(drivers={"acmedrv": "1.2"}),
        "driver acmedrv 1.2 is loaded, but torch finds no accelerator"),
    "a full disk": (job(rank_facts(storage={"free_bytes": 1 << 20})), "/runs: 1 MiB free; make"),
    "a slow link": (job(links=(link((0, 1), 900.0), link((0, 2), 90.0), link((1, 2), 900.0))),
        "between a (rank 0) and c (rank 2): 90 MB/s; choose the network"),
}  # fmt: skip
CASES = {name: (Level.PROBLEM, *case) for name, case in PROBLEMS.items()}
CASES |= {name: (Level.WARNING, *case) for name, case in WARNINGS.items()}


@pytest.mark.parametrize(("level", "facts", "line"), CASES.values(), ids=CASES)
def test_a_fault_is_named_with_what_to_do(level, facts, line):
    worse = [verdict for _, verdict in run_checks(facts) if verdict.level is not Level.OK]
    (found,) = [verdict for verdict in worse if line in str(verdict)]
    assert found.level is level
    assert found.advice
    assert {verdict.level for verdict in worse} <= {level, Level.WARNING}


UNKNOWN = RankFacts.from_json({**asdict(rank_facts()), "mpi": None, "devices": None})


def test_nothing_is_said_against_what_is_well():
    for facts in (
        job(rank_facts(), rank_facts(1)),
        two(software=with_package("torch", "2.13.0+acme")),  # another vendor's build
        two(software=with_package("torch", "2.14.1")),
        two(software={"python": "3.12.1"}),
        two(devices=ACME),
        job(*(rank_facts(r, local_size=2, devices=seeing(str(r))) for r in range(2))),
        pair(devices={**ACME, **NAMED, "physical_id": "02", "shares": True}),
        two(devices={"vendor_library": False}),  # which the CPU has none of
        job(*(rank_facts(r, devices=seeing("02:00")) for r in range(2))),  # of one name
        job(mpirun=MPIRUN),
        job(links=(link((0, 1), 900.0),)),
        JobFacts(ranks=()),
        JobFacts(ranks=(UNKNOWN,)),
    ):
        assert {verdict.level for _, verdict in run_checks(facts)} <= {Level.OK}


def test_versions_that_may_differ_are_listed_and_what_is_found_is_said_briefly():
    other = {**with_package("torch", "2.14.1"), "python": "3.12.1"}
    found = [str(v) for name, v in run_checks(two(software=other)) if name == "software"]
    assert found[1:] == [
        "torch: 2.13.0+cpu on rank 0, 2.14.1 on rank 1",
        "Python: 3.11.7 on rank 0, 3.12.1 on rank 1",
    ]
    infos = [
        RankInfo(n, 0, "a", "cpu", "cpu", "", 0, torch, python_version="3.11.7")
        for n, torch in enumerate(("2.13.0", "2.14.1"))
    ]
    assert differing_software(infos) == ["torch: 2.13.0 on rank 0, 2.14.1 on rank 1"]
    assert differing_software(infos[:1]) == []
    facts = job(links=tuple(replace(link((0, 1), 900.0), latency_us=us) for us in (0.4, 4.0)))
    assert "2 pairs of hosts: <1 to 4 us, 900 MB/s" in [
        str(verdict) for _, verdict in run_checks(facts)
    ]

    def lines(**hosts):
        ranks = [rank_facts(machine={"open_files": n}, host=host) for host, n in hosts.items()]
        return [v.found for name, v in run_checks(job(*ranks)) if name == "limits"]

    assert lines(a=9000) == ["9,000 open files"]
    assert lines(a=9000, b=9000) == ["9,000 open files on all 2 hosts"]
    assert lines(**dict.fromkeys("abcdefg", 9000) | {"c": 8000}) == [
        "9,000 open files on a, b, d, e and 2 more",
        "8,000 open files on c",
    ]
    ranks = [3], [1, 0], [0, 1, 2, 5, 7, 8, 9]
    assert [*map(ranks_text, ranks)] == ["rank 3", "ranks 0, 1", "ranks 0-2, 5, 7-9"]


@pytest.mark.parametrize("change", [{"of_later": 1}, {"machine": {"cores": [2]}}, {"devices": {}}])
def test_facts_of_another_version_are_told_by_it(change, monkeypatch):
    content = {**asdict(rank_facts(software=with_package("kaitian-mpi", "0.9"))), **change}
    for facts, version in ((content, "0.9"), ({"version": 7}, "unknown")):
        with pytest.raises(OtherVersionError, match=f"^{re.escape(version)}$"):
            RankFacts.from_json(facts)
    monkeypatch.setattr(subprocess, "Popen", None)  # each start gathers them in its own process
    facts = collect("host", 0)
    assert facts.software.packages["kaitian-mpi"]
    assert len(facts.machine.cores) >= 1
