"""Scripts of one's own: the examples, and plain torch.distributed."""

from pathlib import Path

import pytest
from jobs import PYTHON

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["own_script.py", "uneven_shares.py"])
def test_the_examples_run(mpirun, name):
    ended = mpirun(2, PYTHON, str(ROOT / "examples" / name))
    assert ended.code == 0, ended.text
    assert ended.out.count("loss") >= 3
    assert ended.err == ""


def test_the_example_model_trains(mpirun):
    ended = mpirun(
        2,
        *"kaitian-train --model examples.own_model:build --max-steps 2".split(),
        PYTHONPATH=str(ROOT),
    )
    assert ended.code == 0, ended.text


def test_plain_torch_knows_the_backend_and_ends_without_a_word(mpirun, tmp_path):
    """No import of kaitian_mpi, no destroy_process_group, and still a clean end."""
    (tmp_path / "script.py").write_text(
        "import sys, torch, torch.distributed as dist\n"
        "assert 'mpi4py.MPI' not in sys.modules\n"
        "dist.init_process_group('kaitian', init_method='mpi://')\n"
        "work = dist.all_reduce(torch.ones(100_000), async_op=True)\n"
        "work.wait()\n"
        "print(dist.get_rank(), 'done')\n"
    )
    ended = mpirun(3, PYTHON, "script.py")
    assert ended.code == 0, ended.text
    assert sorted(ended.out.split()) == ["0", "1", "2", "done", "done", "done"]
    assert ended.err == ""
