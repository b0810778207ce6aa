"""A CUDA device and the CPU in one job. Run by `bin/test` wherever there is such a device."""

import json

import pytest
import torch
from jobs import PYTHON, run_ranks

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device on this machine"
)

ALL_REDUCE = """
import torch, torch.distributed as dist, kaitian_mpi
world = kaitian_mpi.init(devices="cuda:0,cpu")
for algorithm in ("flat", "leader", "striped"):
    dist.group.WORLD.algorithm = algorithm
    for length in (1, 1000, 5_000_001):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            values = torch.arange(length, device=world.device) % 13
            tensor = (values * (world.rank + 1)).to(dtype)
            work = dist.all_reduce(tensor, async_op=True)
            work.wait()
            assert torch.equal(tensor, (values * 3).to(dtype)), (algorithm, length, dtype)
print(world.info.kind, "right")
"""


def test_all_reduce_between_a_gpu_and_the_cpu(tmp_path):
    (tmp_path / "script.py").write_text(ALL_REDUCE)
    ended = run_ranks(2, PYTHON, "script.py", cwd=tmp_path, fresh=True)
    assert ended.code == 0, ended.text
    assert sorted(ended.out.split()) == ["cpu", "cuda", "right", "right"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_on_a_gpu_and_the_cpu(tmp_path, precision):
    ended = run_ranks(
        2,
        *"kaitian-train --model cnn --devices cuda:0,cpu --max-steps 5 --run-dir run".split(),
        *("--precision", precision),
        cwd=tmp_path,
        fresh=True,
    )
    assert ended.code == 0, ended.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["device_kinds"] == ["cuda", "cpu"]
    assert summary["emulated"] is False
