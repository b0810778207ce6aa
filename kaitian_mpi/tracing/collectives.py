"""Records collectives: what they are called with, and how long carrying them out takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

from kaitian_mpi.tracing import recorder
from kaitian_mpi.tracing.recorder import COLLECTIVES

Result = TypeVar("Result")


class GroupLabel(NamedTuple):
    """Identifies a process group."""

    name: str
    """torch's, which another group may get when this one is destroyed."""
    unique: str
    """The same on every rank, and of no other group."""

    @property
    def lane(self) -> str:
        """The lane of its collectives."""
        return COLLECTIVES if self.name in ("", "0") else f"{COLLECTIVES} of group {self.name}"


NO_LABEL = GroupLabel("", "")


def recorded(
    call: Callable[[], Result], name: str, group: GroupLabel, number: int, /, **args: Any
) -> Callable[[], Result]:
    """Return what carries out a collective and records that; the call itself if it is not sampled.

    Args:
        call: carries it out, in whichever thread.
        name: the operation.
        group: the process group.
        number: the collective's place in the order of the group, the same on every rank.
        args: what else is known of it; the call may add to it.
    """
    current = recorder.current
    if current is None or not current.is_recording:
        return call
    known = {
        "number": number,
        "group": group.name,
        "collective": f"{group.unique}#{number}",
        **args,
    }

    def carry_out() -> Result:
        with current.collective(group.lane, name, known):
            return call()

    return carry_out


def is_recorded() -> bool:
    """Return whether this thread carries out a collective that is recorded."""
    return recorder.current is not None and recorder.current.is_in_collective


def part(name: str, lane: str | None = None, **args: Any) -> AbstractContextManager[None]:
    """Return a context that records a part of the collective that this thread carries out.

    Args:
        name: what is done in it.
        lane: where it is shown; None: with the collective.
        args: what else is known of it.
    """
    current = recorder.current
    return _NOTHING if current is None else current.part_of_collective(name, lane, args)


_NOTHING = nullcontext()
