"""Emulated kinds and slowdowns, for trying a mixed job on plain CPUs.

A device that is emulated is wrapped; the rest of the package asks the device. All output and files
of such a job are labelled "emulated".
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from kaitian_mpi.devices.pace import CallPace, Pace, Schedule
from kaitian_mpi.errors import AgreedError, UserError

if TYPE_CHECKING:
    from kaitian_mpi.devices.protocol import Device

KINDS_FLAG = "--emulate-kinds"
SLOWDOWN_FLAG = "--emulate-slowdown"
KINDS_VARIABLE = "KAITIAN_EMULATE_KINDS"
"""The environment variable that applies if `--emulate-kinds` is not given."""
SLOWDOWN_VARIABLE = "KAITIAN_EMULATE_SLOWDOWN"
"""The environment variable that applies if `--emulate-slowdown` is not given."""

_MAX_FACTOR = 1e6  # so that the longest sleep is one that the operating system can do
_MAX_NAMES = 8


class EmulatedDevice:
    """A CPU under the name of another kind, or slowed down; all else is the CPU's own."""

    def __init__(self, device: Device, kind: str, pace: Pace, calls: CallPace) -> None:
        self.device, self.kind, self.pace, self.calls = device, kind, pace, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)


@dataclass(frozen=True)
class Emulation:
    """The emulated kinds and slowdowns of a job, by world rank."""

    kinds: str = ""
    """As `--emulate-kinds`; empty if no device kinds are emulated."""
    slowdown: str = ""
    """As `--emulate-slowdown`."""
    labels: tuple[str, ...] = ()
    """The emulated device kind of every rank; empty if there are none."""
    schedules: tuple[Schedule, ...] = ()
    """The slowdown of every rank."""
    slowdown_name: str = field(default=SLOWDOWN_FLAG, compare=False)
    """The flag or variable that the slowdown comes from."""
    is_from_environment: bool = field(default=False, compare=False)
    """Whether any of it comes from a variable, so that no command or script shows it."""

    def with_slowdown(self, text: str) -> Emulation:
        """Return the same with another `--emulate-slowdown`.

        Raises:
            UserError: it is malformed.
        """
        schedules = parse_slowdown(text, len(self.schedules))
        return replace(self, slowdown=text, schedules=schedules, slowdown_name=SLOWDOWN_FLAG)

    def wrap(self, device: Device, rank: int, shown: str, calls: CallPace | None = None) -> Device:
        """Return a rank's device as the job is to see it: its own if nothing is emulated.

        Args:
            device: the rank's own, or one that was wrapped before.
            rank: its number among the ranks that mpirun started.
            shown: its name, for the error message.
            calls: the pace of a script's own loop, if another than the emulated one.

        Raises:
            UserError: a rank is slowed, and this one's device is not a CPU, whose compute time can
                be measured.
        """
        if isinstance(device, EmulatedDevice):
            device = device.device
        is_slow = any(map(describe_slowdown, self.schedules))
        if is_slow and not device.is_host:
            raise UserError(
                f"{self.slowdown_name}: only CPU ranks can be slowed down, and this one has "
                f"{shown}; give --devices cpu"
            )
        if not self.labels and not is_slow:
            return device
        kind, schedule = self.labels[rank] if self.labels else device.kind, self.schedules[rank]
        calls = calls or CallPace(schedule, self._needs_training())
        return cast("Device", EmulatedDevice(device, kind, Pace(schedule), calls))

    def slowdown_of(self, rank: int) -> str:
        """Describe a rank's slowdown, such as `3x, 1x from step 90`; empty if there is none."""
        return describe_slowdown(self.schedules[rank])

    def describe(self) -> str:
        """Describe it in a line, e.g. `device kinds gpu, mlu; rank 1 slowed 3x`; "" if nothing."""
        parts = []
        if self.labels:
            parts.append(f"device kinds {_join(list(dict.fromkeys(self.labels)))}")
        slowed = [
            f"rank {rank} slowed {text}"
            for rank, text in enumerate(map(describe_slowdown, self.schedules))
            if text
        ]
        return "; ".join([*parts, _join(slowed)] if slowed else parts)

    def _needs_training(self) -> str:
        """Return the error for a script without a `Training`; empty if it needs none."""
        if not any(step for schedule in self.schedules for step, _ in schedule):
            return ""
        return (
            f"{self.slowdown_name}: {self.slowdown!r} has steps, which only a Training has, and "
            "this script communicates outside of one; omit @step, or give the slowdown to "
            "Training(emulate_slowdown=...)"
        )


def given_emulation(kinds: str, slowdown: str) -> list[str]:
    """Return a rank's flags and variables, for `read_emulation`."""
    variables = [os.environ.get(name, "").strip() for name in (KINDS_VARIABLE, SLOWDOWN_VARIABLE)]
    return [kinds.strip(), slowdown.strip(), *variables]


def read_emulation(ranks: Sequence[Sequence[str]]) -> Emulation:
    """Return what the flags say, or else the environment variables.

    A rank without a variable takes the other ranks' value, since mpirun passes the variables of its
    own host to other hosts only if told to.

    Args:
        ranks: the result of `given_emulation` on every rank.

    Raises:
        AgreedError: a value is malformed, or differs between the ranks.
    """
    flag_kinds, flag_slowdowns, variable_kinds, variable_slowdowns = zip(*ranks, strict=True)
    try:
        kinds_name, kinds = _choose(flag_kinds, variable_kinds, KINDS_FLAG, KINDS_VARIABLE)
        slowdown_name, slowdown = _choose(
            flag_slowdowns, variable_slowdowns, SLOWDOWN_FLAG, SLOWDOWN_VARIABLE
        )
        return Emulation(
            kinds,
            slowdown,
            parse_kinds(kinds, len(ranks), kinds_name),
            parse_slowdown(slowdown, len(ranks), slowdown_name),
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
    given = {value: rank for rank, value in enumerate(values) if value or name == flag}
    if len(given) > 1:
        shown = ", ".join(f"{value!r} on rank {values.index(value)}" for value in given)
        raise UserError(f"{name} differs between ranks: {shown}; give every rank the same")
    return name, max(values)  # "" only if all are


def parse_kinds(text: str, world_size: int, name: str = KINDS_FLAG) -> tuple[str, ...]:
    """Parse `gpu,gpu,mlu,mlu`: a label per world rank; none if the text is empty.

    Args:
        text: the labels.
        world_size: the number of ranks.
        name: the flag or variable with this value, for error messages.

    Raises:
        UserError: a label is missing or malformed, or there are not `world_size` of them.
    """
    if not text:
        return ()
    labels = tuple(label.strip() for label in text.split(","))
    for label in filter(None, labels):
        # Labels become part of file names, tables and the lists of other flags.
        if not re.fullmatch(r"[\w.+-]+", label, re.ASCII):
            raise UserError(
                f"{name}: {label!r} cannot be the name of a kind; use letters, digits, '_', '-', "
                "'+' and '.', as in gpu or mlu"
            )
    if len(labels) != world_size or not all(labels):
        given = len([label for label in labels if label])
        raise UserError(
            f"{name} {text} has {given} {'kind' if given == 1 else 'kinds'} for {world_size} "
            f"{'rank' if world_size == 1 else 'ranks'}; give one per rank, as many as mpirun -np "
            "starts"
        )
    return labels


def parse_slowdown(text: str, world_size: int, name: str = SLOWDOWN_FLAG) -> tuple[Schedule, ...]:
    """Parse `2:3.0,3:3.0@50,3:1@90` into a schedule per world rank.

    An entry without a step applies from the start, including the benchmark; a rank without an entry
    has an empty schedule.

    Args:
        text: the entries.
        world_size: the number of ranks.
        name: the flag or variable with this value, for error messages.

    Raises:
        UserError: an entry is not rank:factor or rank:factor@step, or is out of range.
    """
    changes: list[dict[int, float]] = [{} for _ in range(world_size)]
    for entry in filter(None, map(str.strip, text.split(","))):
        rank, factor, step = _read_entry(entry)
        if not (0 <= rank < world_size and 1.0 <= factor <= _MAX_FACTOR and step >= 0):
            raise UserError(
                f"{name}: {entry!r} is not a slowdown; write rank:factor or rank:factor@step with "
                f"a rank from 0 to {world_size - 1} and a factor from 1 to 1e6, such as 1:3.0@50"
            )
        changes[rank][step] = factor
    return tuple(tuple(sorted(of_rank.items())) for of_rank in changes)


def _read_entry(entry: str) -> tuple[int, float, int]:
    """Return rank, factor and step; rank -1 for a malformed entry."""
    rank, _, rest = entry.partition(":")
    factor, at, step = rest.partition("@")
    try:
        return int(rank), float(factor), int(step) if at else 0
    except ValueError:
        return -1, 1.0, 0


def describe_slowdown(schedule: Schedule) -> str:
    """Describe a schedule, e.g. `3x, 1x from step 90`; empty if the rank is never slowed down."""
    if not any(factor > 1 for _, factor in schedule):
        return ""
    return ", ".join(f"{f:g}x" + (f" from step {s}" if s else "") for s, f in schedule)


def _join(names: Sequence[str]) -> str:
    """Join names in one line; of many, only the first few."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
