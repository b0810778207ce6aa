"""Parses and rewrites a command such as `mpirun -np 4 --hostfile hf kaitian-train …`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from kaitian_mpi.errors import UserError
from kaitian_mpi.supervise.hosts import Host, choose, parse_host_list, parse_hostfile

TRAIN = "kaitian-train"
RUN = "kaitian-run"
_MODULES = {"kaitian_mpi.cli.train": TRAIN, "kaitian_mpi.cli.run": RUN}
_LAUNCHERS = ("mpirun", "mpiexec", "orterun", "prterun")

RANKS = ("np", "n", "c")
HOSTFILES = ("hostfile", "machinefile", "default-hostfile", "f")
HOST_LISTS = ("host", "hosts", "H")
FOLDERS = ("wdir", "wd")
PARAMETERS = ("mca", "gmca", "prtemca")
# All options with a value, so that the value is not mistaken for the program. The names are those
# of Open MPI 4 and 5 and of MPICH's hydra, without dashes: Open MPI accepts one or two.
_ONE_VALUE = {
    *(*RANKS, *HOSTFILES, *HOST_LISTS, *FOLDERS),
    *(  # noqa: SIM905  # more readable as text
        "add-host add-hostfile app-pmix-prefix bind-to cpu-list cpu-set cpus-per-proc "
        "cpus-per-rank demux display dvm envlist forward-signals genvlist gpu-support iface "
        "keepalive launch-agent launcher launcher-exec map-by max-vm-size N npernode npersocket "
        "output output-directory output-filename path personality pmix-prefix ppn ppr prefix "
        "preload-files profile pset rank-by rankfile report-pid report-uri rf rmk "
        "runtime-options set-env singleton spawn-timeout stdin stream-buffering timeout tmpdir "
        "tune unset-env with-ft x xterm "
    ).split(),
}
_TWO_VALUES = {
    *PARAMETERS,
    *["append-env", "env", "genv", "gomca", "gpmixmca", "omca", "pmixmca", "prepend-env"],
}


@dataclass(frozen=True)
class MpirunOption:
    """One option of mpirun with its values, or a word that is not an option."""

    words: tuple[str, ...]
    name: str = ""
    """The option without dashes; empty for other words."""
    values: tuple[str, ...] = ()

    @property
    def is_launcher(self) -> bool:
        """Whether it is mpirun, or another launcher."""
        return not self.name and PurePath(self.words[0]).name.split(".")[0] in _LAUNCHERS

    def with_value(self, value: str) -> MpirunOption:
        """Return the option in the same form with another value."""
        flag, equals, _ = self.words[0].partition("=")
        words = (f"{flag}={value}",) if equals else (flag, value)
        return MpirunOption(words, self.name, (value,))


@dataclass(frozen=True, kw_only=True)
class Command:
    """A launcher's command line, split into parts."""

    parts: tuple[MpirunOption, ...]
    """Everything before the arguments of the program, including that program."""
    arguments: tuple[str, ...]
    """The arguments of the program."""
    program: str = ""
    """`TRAIN` or `RUN`; empty if only the launcher was parsed."""

    @property
    def words(self) -> list[str]:
        """The whole command."""
        return [word for part in self.parts for word in part.words] + list(self.arguments)

    def values(self, names: Sequence[str]) -> list[str]:
        """Return the first value of every option with one of these names, in command order."""
        return [part.values[0] for part in self.parts if part.name in names]

    @property
    def ranks(self) -> int | None:
        """The number of ranks in the command's first option for it; None if mpirun decides."""
        numbers = self.values(RANKS)
        return int(numbers[0]) if numbers and numbers[0].isdecimal() else None

    def parameter(self, names: Sequence[str]) -> str:
        """Return the last value of an MCA parameter with one of these names; empty if not given."""
        pairs = [part.values for part in self.parts if part.name in PARAMETERS]
        return next((pair[-1] for pair in reversed(pairs) if pair[0] in names), "")

    def variable(self, name: str, environ: Mapping[str, str]) -> str:
        """Return a variable's value on the ranks: from the command, otherwise from `environ`."""
        value = environ.get(name, "")
        for part in self.parts:
            for word, following in zip(part.words, (*part.words[1:], ""), strict=True):
                if word.startswith(f"{name}="):
                    value = word.removeprefix(f"{name}=")
                elif word == name and len(part.values) > 1:
                    value = following
        return value.strip()

    def replaced(self, names: Sequence[str], values: Sequence[str]) -> Command:
        """Return the command with new values for these options; options without one are removed."""
        left = iter(values)
        parts = []
        for part in self.parts:
            if part.name not in names:
                parts.append(part)
            elif value := next(left, ""):
                parts.append(part.with_value(value))
        return replace(self, parts=tuple(parts))


def parse_command(words: Sequence[str]) -> Command:
    """Parse a command line.

    Raises:
        UserError: the command does not start exactly one kaitian-train or kaitian-run.
    """
    launcher = parse_launcher(words)
    parts = list(launcher.parts)
    position = len(words) - len(launcher.arguments)
    for end in range(position + 1, len(words) + 1):
        program = PurePath(words[end - 1]).name
        if words[end - 2 : end - 1] == ["-m"]:
            program = _MODULES.get(words[end - 1], program)
        if program in (TRAIN, RUN):
            break
    else:
        raise UserError(
            f"the command must start {TRAIN} or {RUN}; write for example: "
            f"kaitian-supervise mpirun -np 4 {TRAIN} --model mobilenetv2"
        )
    parts += [MpirunOption((word,)) for word in words[position:end]]
    if ":" in words:
        raise UserError(
            "the command has several programs separated by ':'; start all ranks with one program: "
            f"mpirun … {program} …"
        )
    return Command(parts=tuple(parts), arguments=tuple(words[end:]), program=program)


def parse_launcher(words: Sequence[str]) -> Command:
    """Parse the launcher, if any, and its options; `arguments` are the words after them."""
    # mpirun may come after `nice` or `env`.
    names = [PurePath(word).name.split(".")[0] for word in words]
    begin = next((n for n, name in enumerate(names, 1) if name in _LAUNCHERS), 0)
    parts = [MpirunOption((word,)) for word in words[:begin]]
    position = begin
    while begin and position < len(words) and words[position].startswith("-"):
        parts.append(_option(words[position:]))
        position += len(parts[-1].words)
    return Command(parts=tuple(parts), arguments=tuple(words[position:]))


def _option(words: Sequence[str]) -> MpirunOption:
    flag, equals, value = words[0].partition("=")
    name = flag.lstrip("-")
    following = 2 if name in _TWO_VALUES else int(name in _ONE_VALUE)
    option = tuple(words[: 1 + max(0, following - bool(equals))])
    return MpirunOption(option, name, ((value,) if equals else ()) + option[1:] or ("",))


def is_given(flag: str, arguments: Iterable[str]) -> bool:
    """Return whether a flag is among a program's arguments."""
    return any(word == flag or word.startswith(f"{flag}=") for word in arguments)


def read_hosts(command: Command) -> tuple[tuple[Host, ...], dict[str, str]]:
    """Return the hosts of a command, and the content of each of its hostfiles by path."""
    hostfiles = {path: read_hostfile(path) for path in command.values(HOSTFILES)}
    from_files = parse_hostfile("\n".join(hostfiles.values()), ", ".join(hostfiles))
    lists = ",".join(command.values(HOST_LISTS))
    return choose(from_files, parse_host_list(lists) if lists else ()), hostfiles


def read_hostfile(path: str) -> str:
    """Return a hostfile's content."""
    if not os.path.isfile(path):
        raise UserError(f"{path} is not a regular file; name a hostfile")
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}); correct it or name another hostfile"
        ) from error
