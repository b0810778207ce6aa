"""Random trainings of mixtures of experts in layout experts, compared with one process in float64.

A case follows from its seed alone, as in `layout_cases.py`, and has one to three mixtures: unlike
experts and numbers of them, some without parameters, frozen, or chosen by no token; top-1 and
top-2; mixtures that are computed again in backward; gates that mixtures share; experts on any
ranks, with mirrors and without, and ranks that have none; ranks without samples; micro-batches of
unlike numbers; the balancing loss; and a resume on other ranks or in another layout in the middle.

    mpirun -np 3 --with-ft ulfm python tests/mpi/expert_cases.py 17        # one seed
    mpirun -np 3 --with-ft ulfm python tests/mpi/expert_cases.py 0:200     # seeds 0 to 199
    mpirun -np 3 ... expert_cases.py 17 --layouts experts,pipeline         # instead of the seed's
    mpirun -np 3 ... expert_cases.py 17 --show                             # the case in words
"""

from __future__ import annotations

import random
from dataclasses import replace

from layout_cases import OPTIMIZERS, Case, main, make_case

_DENSE = ["linear", "act", "norm", "residual", "split", "adds", "gated", "tied", "same", "unused"]
_OTHER_LAYOUTS = "replicate", "shard", "mirrors", "pipeline"
"""Those that train a model of which some parameters are used only for some samples."""


def make_expert_case(seed: int) -> Case:
    """Return the case of a seed; the same on every rank."""
    rng = random.Random(f"experts {seed}")
    blocks = [*rng.choices(_DENSE, k=rng.randint(0, 4)), *["mixture"] * rng.randint(1, 3)]
    rng.shuffle(blocks)
    case = replace(make_case(seed), blocks=blocks)
    exact = [name for name in OPTIMIZERS if name not in ("adagrad", "rmsprop")]
    optimizers = rng.choices(exact, k=len(case.optimizers))
    has_balance = rng.random() < 0.4
    others = ["replicate"] if case.form != "closed" else list(_OTHER_LAYOUTS)
    layouts = ["experts", rng.choice([*others, "experts"]), "experts"][: len(case.stops) + 1]
    if rng.random() < 0.3:
        layouts.reverse()
    if has_balance:  # in other layouts it is of each rank's tokens
        case = replace(case, balance=0.3, loss="mean", micro_batch=0)
        layouts = ["experts"] * len(layouts)
    if "experts" not in layouts:
        layouts[-1] = "experts"
    return replace(
        case,
        layouts=layouts,
        optimizers=optimizers,
        clip=case.clip or (None if {*optimizers} == {"adamw"} else 0.5),  # that none diverges
        tolerance=1e-12,
    )


if __name__ == "__main__":
    main(make_expert_case, __doc__)
