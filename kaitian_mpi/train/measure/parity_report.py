"""What the comparison of the kinds of devices has found, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.train.measure.parity_tolerance import Difference
from kaitian_mpi.train.setup import Setup

FILE = "parity.json"


@dataclass(frozen=True)
class KindReport:
    """What was found on the rank that stands for a kind of device; an entry of parity.json."""

    rank: int
    """The world rank."""
    kind: str
    place: str
    """The rank with its host and device."""
    torch_version: str
    precision: str
    memory_format: str
    loss: float
    worst: list[dict[str, Any]]
    """The fields of a `Difference`: of the loss and the gradients, what differs most beside the
    allowed difference."""

    @property
    def differences(self) -> list[Difference]:
        """The worst of them."""
        return [Difference(**each) for each in self.worst]

    @property
    def agrees(self) -> bool:
        """Whether rounding explains all of them."""
        return all(each.excess <= 1 for each in self.differences)

    def __str__(self) -> str:
        """Return the kind, and how it differs."""
        found = ", ".join(map(str, self.differences))
        return f"{self.kind} ({self.place}, torch {self.torch_version}, {self.precision}): {found}"


def conclude(
    setup: Setup,
    world: World,
    reports: Sequence[KindReport],
    shared: dict[str, Any],
    seconds: float,
) -> bool | None:
    """Write and log the result; the same on every rank.

    Args:
        setup: whose run folder it is written to.
        world: all ranks.
        reports: of each rank that stands for a kind.
        shared: of the reference, its `text`, i.e. where it was computed, and its `loss`.
        seconds: what the comparison took.

    Returns:
        True, as they agree; None if the loss is not finite, so that nothing can be compared.

    Raises:
        AgreedError: a kind does not agree.
    """
    wrong = [report for report in reports if not report.agrees]
    is_number = math.isfinite(shared["loss"])
    content = {
        "agrees": not wrong if is_number else None,
        "reference": shared["text"],
        "reference_loss": shared["loss"],
        "seconds": round(seconds, 3),
        "kinds": [asdict(report) for report in reports],
    }
    setup.folder.write(FILE, content)
    if not is_number:
        print_rank_0(
            world,
            f"parity: not compared, because the loss of the first samples is {shared['loss']}",
        )
        return None
    if wrong:
        raise AgreedError(
            f"parity: forward and backward differ from those of {shared['text']} by more than "
            f"rounding on {'; '.join(map(str, wrong))}; update that device's driver or torch "
            "plug-in, start without it, or skip this with --no-parity"
        )
    kinds = ", ".join(dict.fromkeys(report.kind for report in reports))
    nearest = max(reports, key=lambda report: report.differences[0].excess)
    print_rank_0(world, f"parity: {kinds} compute like {shared['text']} ({seconds:.1f} s)")
    print_rank_0(world, f"parity: nearest to its limit is {nearest.kind}: {nearest.differences[0]}")
    return True
