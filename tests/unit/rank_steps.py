"""What ranks report of a step, from a row for each rank."""

import numpy as np

from kaitian_mpi.balance.rebalancer import RankSteps


def rank_steps(*rows):
    """Take (steps, samples, work_sec, wait_sec) of each rank."""
    return RankSteps(*map(np.array, zip(*rows, strict=True)))
