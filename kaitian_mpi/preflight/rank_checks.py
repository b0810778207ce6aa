"""Verdicts on the ranks: versions, MPI, and whether the ranks see each other."""

from __future__ import annotations

from collections.abc import Iterator

from kaitian_mpi.preflight.facts import PACKAGES, JobFacts, Mpi
from kaitian_mpi.preflight.verdict import (
    Level,
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
    YIELD_ADVICE,
    survival_advice,
)

_LOOK = (
    "look at that rank's lines on stderr, and on its host; give --timeout more seconds if its "
    "disk is only slow"
)


def judge_installed(job: JobFacts) -> Iterator[Verdict]:
    """Every rank has all packages."""
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


def judge_versions(job: JobFacts) -> Iterator[Verdict]:
    """The ranks have the same kaitian-mpi, and send each other the same messages."""
    versions = {facts.rank: facts.software.packages.get("kaitian-mpi", "") for facts in job.ranks}
    installed = {rank: version for rank, version in versions.items() if version}
    protocols = {facts.rank: str(facts.software.protocol) for facts in job.ranks}
    advice = "install the same version on every host"
    yield from _differing("the version of kaitian-mpi", installed, Level.PROBLEM, advice)
    yield from _differing("the wire protocol of kaitian-mpi", protocols, Level.PROBLEM, advice)


def judge_environments(job: JobFacts) -> Iterator[Verdict]:
    """Ranks may have different releases of torch and Python, which are listed."""
    torch = {facts.rank: facts.software.packages.get("torch", "") for facts in job.ranks}
    python = {facts.rank: facts.software.python for facts in job.ranks}
    for name, versions in (("torch", torch), ("Python", python)):
        if len(set(versions.values())) > 1:
            yield ok(f"{name}: {by_value(versions)}")


def judge_mpi_library(job: JobFacts) -> Iterator[Verdict]:
    """The ranks have the same MPI."""
    libraries = {facts.rank: facts.mpi.library for facts in job.ranks if facts.mpi is not None}
    yield from _differing(
        "the MPI library",
        libraries,
        Level.WARNING,
        "install the same one on every host: two releases may not understand each other",
    )


def _differing(what: str, values: dict[int, str], level: Level, advice: str) -> Iterator[Verdict]:
    if len(set(values.values())) > 1:
        yield Verdict(level, f"{what} differs between ranks: {by_value(values)}", advice)


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


def judge_mpi(job: JobFacts) -> Iterator[Verdict]:
    """MPI starts, with threads, and its world is what the launcher started."""
    failed = {facts.rank: facts.faults["mpi"] for facts in job.ranks if "mpi" in facts.faults}
    if failed:
        for reason in dict.fromkeys(failed.values()):
            yield problem_from(reason, "MPI cannot be used: ", _INSTALL)
        return
    known = {facts.rank: facts.mpi for facts in job.ranks if facts.mpi is not None}
    for mpi in known.values():
        if fault := different_mpi(mpi.launched, mpi.size, mpi.library, mpi.by_srun):
            yield problem(f"{fault[0]} ({mpi.library})", fault[1])
            return
        if mpi.launched < mpi.size:
            yield _unknown_launcher(job, mpi)
            return
    single = {rank: mpi.threads for rank, mpi in known.items() if mpi.threads != "multiple"}
    if single:
        yield problem(
            f"MPI's thread level is {by_value(single)}, not multiple",
            "use a build of MPI with MPI_THREAD_MULTIPLE",
        )
    elif known:
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


_UNSET = f"unset {MAPPING_POLICIES[0]}: its :oversubscribe puts every rank on the first host"


def _unknown_launcher(job: JobFacts, mpi: Mpi) -> Verdict:
    ranks = count_text(mpi.size, "rank")
    found = f"MPI sees {ranks}, but no variable of the launcher says which is which"
    advice = "start the job with mpirun; otherwise every rank acts as the first one of its host"
    shared = any(
        len(of_host) > 1 and any(f.devices is not None and not f.devices.is_host for f in of_host)
        for of_host in job.hosts.values()
    )
    return (problem if shared else warning)(found, advice)


_INSTALL = (
    'install one with pip install "kaitian-mpi[mpi]", or load the module of this system\'s MPI and '
    "build mpi4py with it"
)


def judge_survival(job: JobFacts) -> Iterator[Verdict]:
    """Fault tolerance is really on where it was asked for."""
    known = [facts.mpi for facts in job.ranks if facts.mpi is not None]
    if not known or job.launcher is not None:
        return
    unreal = [
        f.rank for f in job.ranks if f.mpi and f.mpi.survives_requested and not f.mpi.survives
    ]
    if unreal and any(mpi.survives is None for mpi in known):
        yield warning(
            f"fault tolerance was asked for; {known[0].library} does not say whether it is on",
            "only Open MPI 5 or newer has it",
        )
    elif unreal:
        yield problem(
            f"fault tolerance was asked for, but MPI has it off on {ranks_text(unreal)}",
            "use an Open MPI built with ULFM (ompi_info: Fault Tolerance support: yes)",
        )
    elif len({mpi.survives_requested for mpi in known}) > 1:
        asked = {f.rank: _on(f.mpi.survives_requested) for f in job.ranks if f.mpi}
        yield problem(
            f"fault tolerance differs between ranks: {by_value(asked)}",
            "give mpirun --with-ft ulfm in place of a variable that only some hosts have",
        )
    else:
        on = known[0].survives_requested
        hint = f", the loss of a rank ends the job; {survival_advice(known[0].library)}"
        yield ok(f"fault tolerance is {_on(on)}{'' if on else hint}")


def judge_waiting(job: JobFacts) -> Iterator[Verdict]:
    """MPI yields the core while it waits, where ranks need it."""
    for host, ranks in job.hosts.items():
        facts = ranks[0]
        if facts.mpi is None or job.launcher is not None:
            continue
        shares = 2 * facts.local_size > facts.machine.cores
        if shares and facts.mpi.yields is False:
            yield warning(
                "MPI spins while it waits, and its ranks have fewer than two cores each",
                YIELD_ADVICE,
                host,
            )
        elif facts.mpi.yields is not None:
            how = "yields its core" if facts.mpi.yields else "spins (each rank has two cores)"
            yield ok(f"MPI {how} while it waits", host)


def judge_transports(job: JobFacts) -> Iterator[Verdict]:
    """The components MPI sends by are listed, and whether it can access device memory."""
    known = [facts.mpi for facts in job.ranks if facts.mpi is not None]
    if known and job.launcher is None:
        chosen = ", ".join(f"{name} {value}" for name, value in known[0].transports.items())
        yield ok(f"{_awareness(known[0])}; components: {chosen or 'chosen by MPI'}")


def judge_launcher(job: JobFacts) -> Iterator[Verdict]:
    """The mpirun that the shell finds belongs to the MPI that mpi4py loads, and starts ranks."""
    launcher = job.launcher
    if launcher is None:
        return
    own = next((facts.mpi.library for facts in job.ranks if facts.mpi is not None), "")
    if not launcher.path:
        yield problem("there is no mpirun in PATH", 'install one: pip install "kaitian-mpi[mpi]"')
    elif own and launcher.library and (OPEN_MPI.name in own) != (OPEN_MPI.name in launcher.library):
        yield problem(
            f"{launcher.path} is {launcher.library}'s, mpi4py loads {own}: each rank would be a "
            "job of its own",
            "put the mpirun of mpi4py's MPI first in PATH, or build mpi4py with this one's",
        )
    elif not own:
        return  # its ranks would fail as this one did
    elif launcher.started is None:
        yield problem(
            f"{launcher.path} cannot start two ranks here: {launcher.error}",
            AS_ROOT_ADVICE if "as root" in launcher.error else "see docs/install.md",
        )
    elif launcher.started != 2:
        yield problem(
            f"{launcher.path} started two ranks, and each was alone: mpirun and mpi4py use "
            "different MPI libraries",
            "use the mpirun of this environment",
        )
    else:
        yield ok(f"{launcher.path} ({launcher.library}) starts ranks that see each other")


def _awareness(mpi: Mpi) -> str:
    if mpi.device_aware is None:
        return "MPI does not say whether it can access device memory"
    return f"built {'with' if mpi.device_aware else 'without'} access to device memory"


def _on(value: bool) -> str:
    return "on" if value else "off"
