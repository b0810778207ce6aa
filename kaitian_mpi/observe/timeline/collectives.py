"""Records collectives: their arguments, and how long it takes to carry them out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.observe.timeline.recorder import COLLECTIVES

Result = TypeVar("Result")


class GroupLabel(NamedTuple):
    """Identifies a process group."""

    name: str
    """torch's name, which torch may reuse once this group is destroyed."""
    unique: str
    """The same on every rank of the group, and different from every other group's."""

    @property
    def lane(self) -> str:
        """The lane in which its collectives are shown."""
        return COLLECTIVES if self.name in ("", "0") else f"{COLLECTIVES} of group {self.name}"


NO_LABEL = GroupLabel("", "")


def recorded(
    call: Callable[[], Result], name: str, group: GroupLabel, number: int, /, **args: Any
) -> Callable[[], Result]:
    """Wrap a call that carries out a collective so that it is recorded, if this step is sampled.

    Args:
        call: carries out the collective, in any thread.
        name: the operation.
        group: the process group.
        number: the collective's number in the group, the same on every rank.
        args: what else to show for it; the call may add to this.
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
    """Return whether this thread is carrying out a collective that is recorded."""
    return recorder.current is not None and recorder.current.is_in_collective


def part(name: str, lane: str | None = None, **args: Any) -> AbstractContextManager[None]:
    """Return a context manager that records part of the collective this thread is carrying out.

    Args:
        name: what this part does.
        lane: where it is shown; None for the collective's own lane.
        args: what else to show for it.
    """
    current = recorder.current
    return _NOTHING if current is None else current.part_of_collective(name, lane, args)


_NOTHING = nullcontext()
