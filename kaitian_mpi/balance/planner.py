"""From scores to batch sizes."""

from __future__ import annotations

from collections.abc import Sequence

from kaitian_mpi.balance.shares import apportion
from kaitian_mpi.errors import UserError


def plan_batches(scores: Sequence[float], global_batch_size: int) -> list[int]:
    """Share the global batch by score; every rank gets at least one sample.

    Args:
        scores: per rank, above 0.
        global_batch_size: samples per step of the whole job.

    Returns:
        Samples per step of each rank; they sum to `global_batch_size`.

    Raises:
        UserError: there are fewer samples than ranks.
    """
    if global_batch_size < len(scores):
        raise UserError(
            f"--global-batch-size: found {global_batch_size} for {len(scores)} ranks, needed at "
            f"least one sample a rank; give {len(scores)} or more, or start fewer ranks"
        )
    batches = apportion(global_batch_size, scores)
    for rank, batch in enumerate(batches):
        if batch == 0:
            batches[batches.index(max(batches))] -= 1
            batches[rank] = 1
    return batches


def plan_batches_as_paper(scores: Sequence[float], batch_size: int) -> list[int]:
    """Return batch_i = round(batch_size x score_i), at least 1 (KAITIAN, arXiv 2505.10183).

    The global batch, their sum, grows with the devices.
    """
    return [max(1, round(batch_size * score)) for score in scores]
