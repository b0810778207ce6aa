"""Examines the hosts of a hostfile before mpirun is started, which may wait minutes for one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from kaitian_mpi import __version__
from kaitian_mpi.errors import UserError
from kaitian_mpi.preflight.verdict import Verdict, count_text, ok, problem, problem_from, warning
from kaitian_mpi.runtime.command import Command, read_hostfile
from kaitian_mpi.runtime.hosts import Host, parse_hostfile
from kaitian_mpi.runtime.mpi_libraries import MAPPING_POLICIES
from kaitian_mpi.supervise.host_check import ask_hosts, version_faults
from kaitian_mpi.supervise.probe import find_agent, is_local


def examine_hosts(
    hostfile: str, pythons: Mapping[str, str], python: str
) -> list[tuple[str, Verdict]]:
    """Ask the hosts of a hostfile whether mpirun can start ranks there; within about 8 s.

    Args:
        hostfile: its path.
        pythons: the interpreters of some hosts, by name.
        python: the interpreter of the others.

    Raises:
        UserError: the hostfile cannot be read, is wrong or empty.
    """
    hosts = parse_hostfile(read_hostfile(hostfile), hostfile)
    if not hosts:
        raise UserError(f"--hostfile {hostfile} is empty; add a line for each host")
    if unknown := [name for name in pythons if name not in {host.name for host in hosts}]:
        raise UserError(
            f"--env names {', '.join(unknown)}, which {hostfile} does not have; it has "
            f"{', '.join(host.name for host in hosts)}"
        )
    interpreters = {host.name: pythons.get(host.name, python) for host in hosts}
    local = frozenset(host.name for host in hosts if is_local(host.name))
    agent = find_agent(Command(parts=(), arguments=()), os.environ)
    answers = ask_hosts(agent, hosts, interpreters, local)
    verdicts = [("hostfile", verdict) for verdict in judge_hostfile(hosts, os.environ)]
    for name, answer in answers.items():
        if answer.fault:
            verdicts.append(("host", problem_from(answer.fault)))
        else:
            shown = f"{name}: kaitian-mpi {answer.version}, {interpreters[name]}"
            verdicts.append(("host", ok(shown)))
    return verdicts + [("versions", problem_from(e)) for e in version_faults(answers, __version__)]


def judge_hostfile(hosts: tuple[Host, ...], environ: Mapping[str, str]) -> Iterator[Verdict]:
    """Judge whether mpirun will put ranks on all of these hosts."""
    for name in MAPPING_POLICIES:
        if "oversubscribe" in environ.get(name, "") and len(hosts) > 1:
            yield problem(
                f"{name}={environ[name]} puts every rank on {hosts[0].name}",
                "unset it: with a hostfile, as many slots as ranks are enough",
            )
    without = [host.name for host in hosts if host.slots is None]
    if without and len(hosts) > 1:
        yield warning(
            f"{', '.join(without)} {'has' if len(without) == 1 else 'have'} no slots, so mpirun "
            "takes as many as there are cores, and may fill the first host alone",
            "write slots=N, one for each device",
        )
    slots = [host.slots for host in hosts if host.slots is not None]
    if len(slots) == len(hosts):
        yield ok(f"{count_text(len(hosts), 'host')} with {count_text(sum(slots), 'slot')}")
