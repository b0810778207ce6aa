"""Random loops over DDP with adaptive batches are exact, or refused."""

import pytest
from adaptive_cases import draw, run

from kaitian_mpi.integrations.adaptive import install

pytestmark = pytest.mark.sizes(3)


SEEDS = (*range(4, 7), 70015)
FURTHER_SEEDS = (*range(4), *range(7, 30), 1182)


@pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in FURTHER_SEEDS)]
)
def test_a_random_loop_trains_as_one_process(world, seed):
    adaptive = install(world)
    try:
        outcome = run(draw(seed, world.size), adaptive)
    finally:
        adaptive.close()
    if isinstance(outcome, str):
        assert "call model.train() before the loop" in outcome
    else:
        assert outcome < 1e-9
