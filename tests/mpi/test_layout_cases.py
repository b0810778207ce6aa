"""Some random trainings in every layout; `layout_cases.py` says how to run others.

And some of mixtures of experts; see `expert_cases.py`.
"""

import pytest
from expert_cases import make_expert_case
from layout_cases import make_case, run_in_folder

# With the further ones of bin/test --all, each kind of layer, optimizer, loss, loop and layout.
SEEDS = (18,)
FURTHER_SEEDS = 0, 2, 24, 5, 7, 9, 14, 19, 23, 28, 29
EXPERT_SEEDS = (16,)
FURTHER_EXPERT_SEEDS = 0, 4, 6, 20, 25, 28, 61, 140
OPEN_PIPELINE = 4


@pytest.mark.sizes(3)
@pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(each, marks=pytest.mark.thorough) for each in FURTHER_SEEDS)]
)
def test_a_random_training_is_that_of_one_process(world, seed):
    assert run_in_folder(make_case(seed), world) == "right"


@pytest.mark.sizes(3)
@pytest.mark.parametrize(
    "seed",
    [*EXPERT_SEEDS, *(pytest.param(n, marks=pytest.mark.thorough) for n in FURTHER_EXPERT_SEEDS)],
)
def test_a_random_mixture_of_experts_is_that_of_one_process(world, seed):
    assert run_in_folder(make_expert_case(seed), world) == "right"


@pytest.mark.sizes(3)
def test_an_open_loop_is_refused_in_stages(world):
    verdict = run_in_folder(make_case(OPEN_PIPELINE), world)
    assert verdict.startswith('refused: layout="pipeline" and auto require Task(loss=...)')
