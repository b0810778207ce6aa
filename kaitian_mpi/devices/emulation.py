"""Emulated kinds and slowdowns, for trying a mixed job on plain CPUs; always labeled."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from kaitian_mpi.devices.pace import CallPace, Pace, Schedule
from kaitian_mpi.errors import AgreedError, UserError

if TYPE_CHECKING:
    from kaitian_mpi.devices.protocol import Device

KINDS_FLAG, SLOWDOWN_FLAG = "--emulate-kinds", "--emulate-slowdown"
MEMORY_FLAG, MEMORY_VARIABLE = "--emulate-memory", "KAITIAN_EMULATE_MEMORY"
KINDS_VARIABLE, SLOWDOWN_VARIABLE = "KAITIAN_EMULATE_KINDS", "KAITIAN_EMULATE_SLOWDOWN"
"""The environment variables that apply if the flags are not given."""

_MAX_FACTOR = 1e6  # so that no sleep is longer than the operating system allows


class EmulatedDevice:
    """A CPU that has the name of another kind, or is slowed down; otherwise unchanged."""

    def __init__(self, device: Device, kind: str, pace: Pace, calls: CallPace) -> None:
        self.device = device
        self.kind = kind
        self.pace = pace
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)


@dataclass(frozen=True)
class Emulation:
    """The emulated kinds and slowdowns of a job, by world rank."""

    kinds: str = ""
    """The value of `--emulate-kinds`; empty if no device kinds are emulated."""
    slowdown: str = ""
    """The value of `--emulate-slowdown`."""
    labels: tuple[str, ...] = ()
    """The emulated device kind of every rank; empty if there are none."""
    schedules: tuple[Schedule, ...] = ()
    """The slowdown of every rank."""

    def with_slowdown(self, text: str) -> Emulation:
        """Return a copy with another `--emulate-slowdown`."""
        return replace(self, slowdown=text, schedules=parse_slowdown(text, len(self.schedules)))

    def wrap(self, device: Device, rank: int, shown: str, calls: CallPace | None = None) -> Device:
        """Return a rank's emulated device, or the device itself if nothing is emulated."""
        if isinstance(device, EmulatedDevice):
            device = device.device
        is_slow = any(map(describe_slowdown, self.schedules))
        if is_slow and not device.is_host:
            raise UserError(
                f"{SLOWDOWN_FLAG}: only CPU ranks can be slowed down, and this one has {shown}; "
                "give --devices cpu"
            )
        if not self.labels and not is_slow:
            return device
        kind = self.labels[rank] if self.labels else device.kind
        schedule = self.schedules[rank]
        calls = calls or CallPace(schedule)
        return cast("Device", EmulatedDevice(device, kind, Pace(schedule), calls))

    def describe(self) -> str:
        """Return a line such as `device kinds gpu, mlu; rank 1 slowed 3x`; "" without emulation."""
        parts = []
        if self.labels:
            parts.append(f"device kinds {', '.join(dict.fromkeys(self.labels))}")
        slowdowns = map(describe_slowdown, self.schedules)
        slowed = [f"rank {rank} slowed {text}" for rank, text in enumerate(slowdowns) if text]
        if any(step for schedule in self.schedules for step, _ in schedule):
            slowed[-1] += " (steps are counted by a Training only)"
        return "; ".join([*parts, ", ".join(slowed)] if slowed else parts)


def given_emulation(kinds: str, slowdown: str) -> list[str]:
    """Return a rank's flags, or its variables without flags, for `read_emulation`."""
    return [
        kinds.strip() or os.environ.get(KINDS_VARIABLE, "").strip(),
        slowdown.strip() or os.environ.get(SLOWDOWN_VARIABLE, "").strip(),
    ]


def read_emulation(ranks: Sequence[Sequence[str]]) -> Emulation:
    """Return the emulation from every rank's `given_emulation`, which may be empty on some."""
    by_setting = zip(*ranks, strict=True)
    try:
        kinds, slowdown = map(_agreed, (KINDS_FLAG, SLOWDOWN_FLAG), by_setting)
        size = len(ranks)
        return Emulation(kinds, slowdown, parse_kinds(kinds, size), parse_slowdown(slowdown, size))
    except UserError as error:  # every rank has the same values
        raise AgreedError(str(error)) from None


def _agreed(flag: str, values: Sequence[str]) -> str:
    different = list(dict.fromkeys(filter(None, values)))
    if len(different) > 1:
        shown = ", ".join(f"{value!r} on rank {values.index(value)}" for value in different)
        raise UserError(f"{flag} differs between ranks: {shown}; give every rank the same")
    return different[0] if different else ""


def parse_kinds(text: str, world_size: int) -> tuple[str, ...]:
    """Parse `gpu,gpu,mlu,mlu`: a label per world rank; none if the text is empty."""
    if not text:
        return ()
    labels = tuple(label.strip() for label in text.split(","))
    named = [label for label in labels if label]
    for label in named:
        # Labels become part of file names, tables and the lists of other flags.
        if not re.fullmatch(r"[\w.+-]+", label, re.ASCII):
            raise UserError(
                f"{KINDS_FLAG}: {label!r} cannot be the name of a kind; use letters, digits, '_', "
                "'-', '+' and '.', as in gpu or mlu"
            )
    if not all(labels):
        raise UserError(f"{KINDS_FLAG} {text!r}: a kind is missing beside a comma; write one there")
    if len(labels) != world_size:
        raise UserError(
            f"{KINDS_FLAG} {text}: give one kind per rank; mpirun has started {world_size}, and "
            f"there are {len(named)}"
        )
    return labels


def parse_slowdown(text: str, world_size: int) -> tuple[Schedule, ...]:
    """Parse `2:3.0,3:3.0@50,3:1@90` into a schedule per world rank."""
    changes: list[dict[int, float]] = [{} for _ in range(world_size)]
    for entry in filter(None, map(str.strip, text.split(","))):
        number, _, rest = entry.partition(":")
        times, at, since = rest.partition("@")
        try:
            rank = int(number)
            factor = float(times)
            step = int(since) if at else 0
        except ValueError:
            rank = -1
            factor = 1.0
            step = 0
        if not (0 <= rank < world_size and 1.0 <= factor <= _MAX_FACTOR and step >= 0):
            raise UserError(
                f"{SLOWDOWN_FLAG}: {entry!r} is not a slowdown; write rank:factor or "
                f"rank:factor@step with a rank from 0 to {world_size - 1} and a factor from 1 to "
                "1e6, such as 1:3.0@50"
            )
        changes[rank][step] = factor
    return tuple(tuple(sorted(of_rank.items())) for of_rank in changes)


def describe_slowdown(schedule: Schedule) -> str:
    """Describe a schedule, e.g. `3x, 1x from step 90`; empty if the rank is never slowed down."""
    if not any(factor > 1 for _, factor in schedule):
        return ""
    return ", ".join(f"{f:g}x" + (f" from step {s}" if s else "") for s, f in schedule)
