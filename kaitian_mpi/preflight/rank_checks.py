"""Verdicts on the ranks: versions, MPI, and whether the ranks see each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kaitian_mpi.preflight.facts import PACKAGES, JobFacts, Link
from kaitian_mpi.preflight.verdict import (
    Verdict,
    by_value,
    count_text,
    ok,
    problem,
    problem_from,
    ranks_by,
    ranks_text,
    warning,
)
from kaitian_mpi.runtime.launcher import different_mpi
from kaitian_mpi.runtime.mpi_libraries import (
    AS_ROOT_ADVICE,
    MAPPING_POLICIES,
    OPEN_MPI,
    survival_advice,
)

_LOOK = (
    "look at that rank's lines on stderr, and on its host; give --timeout more seconds if its "
    "disk is only slow"
)
_INSTALL = (
    'install one with pip install "kaitian-mpi[mpi]", or load the module of this system\'s MPI and '
    "build mpi4py with it"
)
_UNSET = f"unset {MAPPING_POLICIES[0]}: its :oversubscribe puts every rank on the first host"
_NETWORK = "choose the network with mpirun --mca btl_tcp_if_include"
_SLOW_MB_PER_SEC = 100.0  # a link of 1 Gbit/s has 118


def judge_presence(job: JobFacts) -> Iterator[Verdict]:
    """Every rank has answered."""
    for reason, ranks in ranks_by(job.missing).items():
        yield problem(f"{ranks_text(ranks)}: {reason}", _LOOK)


def judge_faults(job: JobFacts) -> Iterator[Verdict]:
    """Every examination came to an end."""
    names = dict.fromkeys(name for facts in job.ranks for name in facts.faults if name != "mpi")
    for name in names:
        reasons = {facts.rank: facts.faults[name] for facts in job.ranks if name in facts.faults}
        for reason, ranks in ranks_by(reasons).items():
            where = f" ({ranks_text(ranks)})" if len(job.ranks) > 1 else ""
            yield problem(
                f"the examination of {name} failed{where}: {reason}",
                "correct what it names; training would fail in the same way",
            )


def judge_software(job: JobFacts) -> Iterator[Verdict]:
    """Every rank has all packages; releases of torch and Python may differ, and are listed."""
    lacking: dict[int, str] = {}
    for facts in job.ranks:
        names = [name for name in PACKAGES if not facts.software.packages.get(name)]
        if names:
            lacking[facts.rank] = ", ".join(names)
    if lacking:
        yield problem(f"not installed: {by_value(lacking)}", "install kaitian-mpi there with pip")
    elif job.ranks:
        packages = job.ranks[0].software.packages
        shown = ", ".join(f"{name} {packages[name]}" for name in PACKAGES[:3])
        yield ok(f"Python {job.ranks[0].software.python}, {shown}")
    torch = {facts.rank: facts.software.packages.get("torch", "") for facts in job.ranks}
    python = {facts.rank: facts.software.python for facts in job.ranks}
    for name, versions in (("torch", torch), ("Python", python)):
        if _differ(versions):
            yield ok(f"{name}: {by_value(versions)}")


def judge_versions(job: JobFacts) -> Iterator[Verdict]:
    """The ranks have the same kaitian-mpi, messages and MPI."""
    software = {facts.rank: facts.software for facts in job.ranks}
    versions = {rank: each.packages.get("kaitian-mpi", "") for rank, each in software.items()}
    compared = {
        "version": {rank: version for rank, version in versions.items() if version},
        "wire protocol": {rank: str(each.protocol) for rank, each in software.items()},
    }
    for what, values in compared.items():
        if _differ(values):
            yield problem(
                f"the {what} of kaitian-mpi differs between ranks: {by_value(values)}",
                "install the same version on every host",
            )
    libraries = {facts.rank: facts.mpi.library for facts in job.ranks if facts.mpi is not None}
    if _differ(libraries):
        yield warning(
            f"the MPI library differs between ranks: {by_value(libraries)}",
            "install the same one on every host: two releases may not understand each other",
        )


def judge_mpi(job: JobFacts) -> Iterator[Verdict]:
    """MPI starts, with threads, and its world is what the launcher started."""
    failed = {facts.rank: facts.faults["mpi"] for facts in job.ranks if "mpi" in facts.faults}
    for reason in dict.fromkeys(failed.values()):
        yield problem_from(reason, "MPI cannot be used: ", _INSTALL)
    known = {facts.rank: facts.mpi for facts in job.ranks if facts.mpi is not None}
    if failed or not known:
        return
    for mpi in known.values():
        if fault := different_mpi(mpi.launched, mpi.size, mpi.library, mpi.by_srun):
            yield problem(f"{fault[0]} ({mpi.library})", fault[1])
            return
        if mpi.launched < mpi.size:
            ranks = count_text(mpi.size, "rank")
            yield problem(
                f"MPI sees {ranks}, but no variable of the launcher says which is which",
                "start the job with mpirun; otherwise every rank acts as the first of its host",
            )
            return
    single = {rank: mpi.threads for rank, mpi in known.items() if mpi.threads != "multiple"}
    if single:
        yield problem(
            f"MPI's thread level is {by_value(single)}, not multiple",
            "use a build of MPI with MPI_THREAD_MULTIPLE",
        )
    else:
        first = next(iter(known.values()))
        yield ok(f"{first.library}, {count_text(first.size, 'rank')}, thread level {first.threads}")


def judge_placement(job: JobFacts) -> Iterator[Verdict]:
    """The ranks are on the hosts that mpirun was given."""
    if not job.ranks or len(job.ranks[0].given_hosts) < 2:
        return
    first, given = job.ranks[0], job.ranks[0].given_hosts
    count = first.local_size
    shown = ", ".join(f"{name} ({'?' if n is None else n})" for name, n in given.items())
    found = f"all {count} ranks are on {first.host}; mpirun was given (slots) {shown}"
    if all(slots is not None and slots < count for slots in given.values()):
        yield problem(found, _UNSET)
    else:
        yield warning(found, "start more ranks, or write slots=N for each host in the hostfile")


def judge_survival(job: JobFacts) -> Iterator[Verdict]:
    """Fault tolerance is really on where it was asked for."""
    known = {facts.rank: facts.mpi for facts in job.ranks if facts.mpi is not None}
    if not known or job.launcher is not None:
        return
    library = next(iter(known.values())).library
    asked = {rank: "on" if mpi.survives_requested else "off" for rank, mpi in known.items()}
    unreal = [rank for rank, mpi in known.items() if mpi.survives_requested and not mpi.survives]
    if unreal:
        yield problem(
            f"fault tolerance was asked for, but MPI has none on {ranks_text(unreal)}",
            "use an Open MPI 5 built with ULFM (ompi_info: Fault Tolerance support: yes)",
        )
    elif _differ(asked):
        yield problem(
            f"fault tolerance differs between ranks: {by_value(asked)}",
            "give mpirun --with-ft ulfm in place of a variable that only some hosts have",
        )
    elif "on" in asked.values():
        yield ok("fault tolerance is on")
    else:
        hint = f"the loss of a rank ends the job; {survival_advice(library)}"
        yield ok(f"fault tolerance is off, {hint}")


def judge_launcher(job: JobFacts) -> Iterator[Verdict]:
    """The mpirun that the shell finds belongs to the MPI that mpi4py loads, and starts ranks."""
    launcher = job.launcher
    if launcher is None:
        return
    own = next((facts.mpi.library for facts in job.ranks if facts.mpi is not None), "")
    if not launcher.path:
        yield problem("there is no mpirun in PATH", 'install one: pip install "kaitian-mpi[mpi]"')
    elif not own:
        return  # its ranks would fail as this one did
    elif launcher.started == 2:
        yield ok(f"{launcher.path} ({launcher.library}) starts ranks that see each other")
    elif launcher.started is not None or (
        launcher.library and (OPEN_MPI.name in own) != (OPEN_MPI.name in launcher.library)
    ):
        yield problem(
            f"{launcher.path} is {launcher.library or 'unknown'}'s, mpi4py loads {own}: each rank "
            "is a job of its own",
            "put the mpirun of mpi4py's MPI first in PATH, or build mpi4py with this one's",
        )
    else:
        yield problem(
            f"{launcher.path} cannot start two ranks here: {launcher.error}",
            AS_ROOT_ADVICE if "as root" in launcher.error else "see docs/install.md",
        )


def judge_links(job: JobFacts) -> Iterator[Verdict]:
    """Messages arrive between the ranks, about as fast everywhere."""
    for link in job.links:
        if link.error:
            advice = f"check that no firewall is between the hosts, and {_NETWORK}"
            yield problem(f"between {_ends(link)}: {link.error}", advice)
    speeds = [link.mb_per_sec for link in job.links if link.mb_per_sec is not None]
    delays = [link.latency_us for link in job.links if link.latency_us is not None]
    if not speeds:
        return
    between_hosts = any(link.hosts[0] != link.hosts[1] for link in job.links)
    found = f"{len(speeds)} pairs of {'hosts' if between_hosts else 'ranks'}"
    figures = f"{_range(delays)} us, {_range(speeds)} MB/s"
    yield ok(f"{found if len(speeds) > 1 else 'one pair'}: {figures}")
    for link in job.links:
        if between_hosts and link.mb_per_sec is not None and link.mb_per_sec < _SLOW_MB_PER_SEC:
            found = f"between {_ends(link)}: {link.mb_per_sec:,.0f} MB/s"
            yield warning(found, f"{_NETWORK}, use larger batches, or leave the host out")


def _ends(link: Link) -> str:
    (a, b), (first, second) = link.ranks, link.hosts
    if first == second:
        return f"ranks {a} and {b}"
    return f"{first} (rank {a}) and {second} (rank {b})"


def _range(values: list[float]) -> str:
    least, most = (f"{end:,.0f}" if end >= 1 else "<1" for end in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def _differ(values: Mapping[int, str]) -> bool:
    return len(set(values.values())) > 1
