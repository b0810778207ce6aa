"""`kaitian-run`: somebody's torch.distributed script, unmodified."""

import re

SCRIPT = """
import argparse, os, sys
import psutil
import torch
import torch.distributed as dist
from torch.distributed import init_process_group

parser = argparse.ArgumentParser()
parser.add_argument("--exit", type=int, default=0)
options = parser.parse_args()
init_process_group("nccl")
assert dist.get_rank() == int(os.environ["RANK"])
assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])
assert 0 <= int(os.environ["LOCAL_RANK"]) < int(os.environ["LOCAL_WORLD_SIZE"])
tensor = torch.ones(3)
dist.all_reduce(tensor)
pair = dist.new_group([0, 1], backend="gloo")
connections = psutil.Process().net_connections("tcp")
ports = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
torch_listens = int(os.environ["MASTER_PORT"]) in ports
print(dist.get_backend(), int(tensor[0]), sys.argv[1:], "torch listens:", torch_listens)
dist.destroy_process_group()
sys.exit(options.exit if os.environ["RANK"] == "1" else 0)
"""


def test_a_script_that_names_nccl_runs_on_kaitian_and_opens_no_port(mpirun, tmp_path):
    (tmp_path / "theirs.py").write_text(SCRIPT)
    ended = mpirun(
        3,
        *"kaitian-run --backend-override nccl,gloo --emulate-kinds a,b,b".split(),
        *"theirs.py --exit 0".split(),
    )
    assert ended.code == 0, ended.text
    lines = ended.out.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert re.fullmatch(r"kaitian 3 \['--exit', '0'\] torch listens: False", line)
    assert ended.err == ""


def test_a_script_that_leaves_with_a_code_ends_the_job_with_it(mpirun, tmp_path):
    (tmp_path / "theirs.py").write_text(SCRIPT)
    ended = mpirun(2, *"kaitian-run --backend-override nccl,gloo theirs.py --exit 7".split())
    assert ended.code == 7, ended.text
    assert re.search(r"^\[1@[^\]]+\] sys\.exit\(7\)", ended.err, re.MULTILINE)


def test_mistakes(mpirun):
    ended = mpirun(2, "kaitian-run", "nowhere.py")
    assert ended.code == 2
    assert ended.err.count("kaitian-run: error: found no script nowhere.py") == 1


def test_a_mistake_that_only_one_rank_meets_is_said_by_it(mpirun, tmp_path):
    (tmp_path / "theirs.py").write_text(SCRIPT)
    ended = mpirun(
        *(2, "sh", "-c"),
        'test "$OMPI_COMM_WORLD_RANK" = 0 && exec kaitian-run theirs.py || kaitian-run nowhere.py',
    )
    assert ended.code == 2, ended.text
    assert ended.err.count("kaitian-run: error: found no script nowhere.py") == 1
