"""`kaitian-run`: an unmodified torch.distributed script."""

import re
import sys

import pytest
from jobs import PLANTED, SOON_SEC, run_alone

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
line = f"{dist.get_backend()} {int(tensor[0])} {sys.argv[1:]} torch listens: {torch_listens}"
os.write(1, f"{line}\\n".encode())  # at once, so that ranks' words are not mixed
dist.destroy_process_group()
sys.exit(options.exit if os.environ["RANK"] == "1" else 0)
"""


@pytest.mark.any_mpi
def test_a_script_that_names_nccl_runs_on_kaitian_and_opens_no_port(mpirun):
    flags = "--backend-override nccl,gloo --emulate-kinds a,b,b"
    ended = mpirun(3, *f"kaitian-run {flags} script.py --exit 0".split(), script=SCRIPT)
    assert ended.out.splitlines() == 3 * ["kaitian 3 ['--exit', '0'] torch listens: False"]
    assert re.fullmatch(r"\[0@[^\]]+\] the job is emulated: device kinds a, b\n", ended.err)


STOCK_DDP = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if "init" in sys.argv:
    import kaitian_mpi
    kaitian_mpi.init()
else:
    dist.init_process_group("kaitian", init_method="mpi://")
torch.set_num_threads(1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(1024, 256)
dist.barrier()
began, used = time.perf_counter(), time.thread_time()
for _ in range(10):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
dist.barrier()
ratio = (time.perf_counter() - began) / (time.thread_time() - used)
print(dist.get_rank(), ratio, dist.group.WORLD.has_one_group, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("command", "variables", "line"),
    [
        (
            [sys.executable, "script.py"],
            {"KAITIAN_EMULATE_KINDS": "gpu,mlu", "KAITIAN_EMULATE_SLOWDOWN": "1:3"},
            r"the job is emulated: device kinds gpu, mlu; rank 1 slowed 3x",
        ),
        pytest.param(
            "kaitian-run --emulate-kinds gpu,mlu --emulate-slowdown 1:3 script.py init".split(),
            {"KAITIAN_EMULATE_KINDS": "cpu", "KAITIAN_EMULATE_SLOWDOWN": "9:9"},
            r"\[0@[^\]]+\] the job is emulated: device kinds gpu, mlu; rank 1 slowed 3x",
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["variables", "flags"],
)
def test_a_script_takes_the_hybrid_path_with_a_slow_rank(mpirun, command, variables, line):
    ended = mpirun(2, *command, **variables, script=STOCK_DDP)
    assert re.fullmatch(line + "\n", ended.err)
    figures = dict(re.findall(r"^(\d) (\S+) False$", ended.out, re.M))
    assert set(figures) == {"0", "1"}
    assert float(figures["1"]) > 2.6  # some of the CPU time was spent starting collectives


SIGNALS = """
import multiprocessing, os, signal, sys, time
import torch, torch.distributed as dist

def square(x):
    return x * x

caught = []
signal.signal(signal.SIGTERM, lambda *_: caught.append("TERM"))
signal.signal(signal.SIGUSR1, lambda *_: caught.append("USR1"))
dist.init_process_group("kaitian", init_method="mpi://")
for number in (signal.SIGUSR1, signal.SIGTERM):
    os.kill(os.getpid(), number)
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
except KeyboardInterrupt:
    caught.append("INT")

forked = multiprocessing.get_context("fork")
child = forked.Process(target=signal.pause)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
child.start()
child.terminate()
child.join()
with forked.Pool(2) as pool:  # which terminates its processes
    squares = pool.map(square, range(3))

leaving = os.fork()
if leaving == 0:
    sys.exit(7)
raising = os.fork()
if raising == 0:
    raise ValueError("planted")
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (leaving, raising)]

tensor = torch.ones(1)
dist.all_reduce(tensor)
print(int(tensor), caught, child.exitcode, squares, codes)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "command", [["kaitian-run"], pytest.param([sys.executable], marks=pytest.mark.thorough)]
)
def test_a_script_keeps_its_own_signal_handlers_and_forks(mpirun, command):
    ended = mpirun(2, *command, "script.py", script=SIGNALS)
    assert ended.out.splitlines() == 2 * ["2 ['USR1', 'TERM', 'INT'] -15 [0, 1, 4] [7, 1]"]
    assert ended.err.count("ValueError: planted") == 2  # of the children alone


@pytest.mark.thorough
@pytest.mark.any_mpi
def test_a_scripts_exit_code_becomes_the_jobs(mpirun):
    command = "kaitian-run --backend-override nccl,gloo script.py --exit 7".split()
    ended = mpirun(2, *command, fresh=True, code=7, script=SCRIPT)
    assert re.search(r"^\[1@[^\]]+\] sys\.exit\(7\)", ended.err, re.MULTILINE)


def test_a_supervised_script_can_tell_that_it_has_ended(mpirun):
    folder = {"OMPI_KAITIAN_JOB_FOLDER": "/proc/none"}
    ended = mpirun(2, "kaitian-run", "-m", "this", code=2, **folder)
    assert ended.err.count("cannot write /proc/none (No such file or directory), where") == 1


@pytest.mark.any_mpi
def test_an_error_on_a_single_rank_is_reported_by_it(mpirun):
    ended = mpirun(
        *(2, "sh", "-c"),
        'test "$OMPI_COMM_WORLD_RANK$PMI_RANK" = 0 && exec kaitian-run script.py'
        " || kaitian-run nowhere.py",
        code=2,
        script=SCRIPT,
    )
    assert ended.err.count("kaitian-run: error: there is no script nowhere.py") == 1


LEAVING = """
import os, sys, time
import torch
import torch.distributed as dist

rank, how = int(os.environ["RANK"]), sys.argv[1]
leaves = rank == int(sys.argv[2])

def leave(now):
    if now:
        print(f"left at {time.time()}", flush=True)
        sys.exit(0)

leave(how == "before init" and leaves)
dist.init_process_group("nccl")
tensor = torch.ones(2)
dist.all_reduce(tensor)
if how == "in the middle":
    leave(leaves)
    dist.all_reduce(tensor)
groups = [dist.new_group() for _ in range(6)]
for group in groups:
    dist.all_reduce(tensor, group=group)
pending = [dist.irecv(torch.ones(1), (rank + 1) % 3) for _ in range(3)]
for group in groups[:: -1 if rank == 1 else 1][: 2 * rank]:
    dist.destroy_process_group(group)
if leaves:
    dist.destroy_process_group()
    sys.exit(0)
time.sleep(rank / 2)
"""


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("how", "rank", "message"),
    [
        pytest.param(
            "before init",
            1,
            r"init_process_group: rank 1 of 3 left the job without calling it",
            marks=pytest.mark.thorough,
        ),
        ("before init", 0, r"init_process_group: rank 0 of 3 left the job without calling it"),
        ("in the middle", 2, r"rank 2 of 3 ended the group before all_reduce #2"),
    ],
)
def test_a_rank_that_exits_early_with_0_is_named(mpirun, how, rank, message):
    command = "kaitian-run --backend-override nccl script.py".split()
    ended = mpirun(3, *command, how, rank, code=None, script=LEAVING)
    assert ended.code not in (0, None), ended.text
    assert re.search(rf"^\[\d@[^\]]+\] .*{message}", ended.err, re.MULTILINE), ended.text
    left_at = float(re.search(r"left at (\S+)", ended.out)[1])
    assert ended.ended_at - left_at < SOON_SEC


def test_ranks_may_exit_in_any_order_with_open_groups_and_messages(mpirun):
    command = "kaitian-run --backend-override nccl script.py normally 0".split()
    ended = mpirun(3, *command, script=LEAVING)
    assert ended.err == ""


WHICH = """
import os
import torch
import kaitian_mpi

own = kaitian_mpi.init().info.device_name
local_rank = int(os.environ["LOCAL_RANK"])
if not torch.accelerator.is_available():
    print(local_rank, "cpu", torch.mlu.device_count())
else:
    devices = ["mlu", f"mlu:{local_rank}", torch.accelerator.current_accelerator()]
    found = [torch.empty(1, device=device).device for device in devices]
    torch.mlu.set_device(local_rank)
    found.append(torch.empty(1, device="mlu").device)
    print(local_rank, *{own, *(torch.mlu.get_device_name(each.index) for each in found)})
"""


@pytest.mark.device_in_python
@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        pytest.param("mlu:0,cpu", ["0 board 0", "1 cpu 0"], marks=pytest.mark.thorough),
        ("mlu:5,mlu:2", ["2 board 2", "5 board 5"]),
    ],
)
def test_a_script_takes_its_own_device_however_it_asks(mpirun, devices, expected):
    words = ("kaitian-run", "--devices", devices, "script.py")
    ended = mpirun(2, *words, PYTHONPATH=str(PLANTED / "emulated_mlu"), script=WHICH)
    assert sorted(ended.out.splitlines()) == expected


MODULE = """
import os, pickle, sys

class Content:
    pass

copy = pickle.loads(pickle.dumps(Content()))
arguments = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
print(__name__, __package__, __spec__.name, arguments, sys.path[0], type(copy) is Content)
"""


def test_a_module_runs_as_python_runs_it(mpirun, tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import sys\nprint(sys.argv, flush=True)\n")
    (package / "__main__.py").write_text(MODULE)
    words = ["-m", "package", "--lr", "1"]
    alone = run_alone(sys.executable, *words, cwd=tmp_path, fresh=True)
    ended = mpirun(2, "kaitian-run", *words)
    assert sorted(ended.out.splitlines()) == sorted(2 * alone.out.splitlines())
    ended = mpirun(2, *"kaitian-run -m package.missing".split(), code=2)
    assert ended.err.count("kaitian-run: error: -m package.missing: no module of this name") == 1
