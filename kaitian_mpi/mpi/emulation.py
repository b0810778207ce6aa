"""What a job emulates: read from flags or the environment, and the same on every rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kaitian_mpi.devices.emulation import (
    KINDS_FLAG,
    KINDS_VARIABLE,
    SLOWDOWN_FLAG,
    SLOWDOWN_VARIABLE,
    Schedule,
    describe_slowdown,
    is_slowed,
    parse_kinds,
    parse_slowdown,
)
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import gather_values, join_errors

if TYPE_CHECKING:
    from mpi4py import MPI

_MAX_NAMES = 8


@dataclass(frozen=True)
class Emulation:
    """What the job emulates."""

    kinds: str = ""
    """As `--emulate-kinds`; empty if no device kinds are emulated."""
    slowdown: str = ""
    """As `--emulate-slowdown`."""
    labels: tuple[str, ...] = ()
    """The emulated device kind of every rank, by world rank; empty if there are none."""
    schedules: tuple[Schedule, ...] = ()
    """The slowdown of every rank."""
    slowdown_name: str = field(default=SLOWDOWN_FLAG, compare=False)
    """The flag or variable that the slowdown comes from."""
    is_from_environment: bool = field(default=False, compare=False)
    """Whether any of it comes from a variable, so that no command or script shows it."""

    @property
    def has_steps(self) -> bool:
        """Whether a slowdown starts or ends at a step."""
        return any(step for schedule in self.schedules for step, _ in schedule)

    def describe(self) -> str:
        """Describe it in a line, e.g. `device kinds gpu, mlu; rank 1 slowed 3x`; "" if nothing."""
        parts = []
        if self.labels:
            parts.append(f"device kinds {_join(list(dict.fromkeys(self.labels)))}")
        slowed = [
            f"rank {rank} slowed {describe_slowdown(schedule)}"
            for rank, schedule in enumerate(self.schedules)
            if is_slowed(schedule)
        ]
        return "; ".join([*parts, _join(slowed)] if slowed else parts)


def agree_on_emulation(comm: MPI.Comm, kinds: str = "", slowdown: str = "") -> Emulation:
    """Return what the flags say, or else the environment variables. Collective.

    A rank without a variable takes the other ranks' value, since mpirun passes the variables of its
    own host to other hosts only if told to.

    Args:
        comm: all ranks that mpirun started.
        kinds: as `--emulate-kinds`; empty: what the variable says.
        slowdown: as `--emulate-slowdown`, likewise.

    Raises:
        AgreedError: a value is malformed, or differs between the ranks.
    """
    variables = [os.environ.get(name, "").strip() for name in (KINDS_VARIABLE, SLOWDOWN_VARIABLE)]
    ranks = gather_values(comm, [kinds.strip(), slowdown.strip(), *variables])
    flag_kinds, flag_slowdowns, variable_kinds, variable_slowdowns = zip(*ranks, strict=True)
    try:
        kinds_name, kinds = _choose(flag_kinds, variable_kinds, KINDS_FLAG, KINDS_VARIABLE)
        slowdown_name, slowdown = _choose(
            flag_slowdowns, variable_slowdowns, SLOWDOWN_FLAG, SLOWDOWN_VARIABLE
        )
        return Emulation(
            kinds,
            slowdown,
            parse_kinds(kinds, comm.size, kinds_name),
            parse_slowdown(slowdown, comm.size, slowdown_name),
            slowdown_name,
            (kinds_name == KINDS_VARIABLE and bool(kinds))
            or (slowdown_name == SLOWDOWN_VARIABLE and bool(slowdown)),
        )
    except UserError as error:  # every rank has the same values
        raise AgreedError(str(error)) from None


def _choose(
    flags: Sequence[str], variables: Sequence[str], flag: str, variable: str
) -> tuple[str, str]:
    """Return the name and the value of what applies, given every rank's flag and variable."""
    name, values = (flag, flags) if any(flags) else (variable, variables)
    given = {value for value in values if value or name == flag}
    if len(given) > 1:
        found = [f"found {value!r}" if value in given else "" for value in values]
        raise UserError(f"{name}: {join_errors(found)}; needed the same on every rank; correct it")
    return name, max(values)  # "" only if all are


def _join(names: Sequence[str]) -> str:
    """Join names in one line; of many, only the first few."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
