"""`kaitian-run --adaptive` and `--layout shard`: users' trainers, unmodified."""

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from choices import by_default
from jobs import PYTHON, SCRIPTS, HostsJob, fork_server, forked, run_alone
from shared.emulated_hosts import reason_to_skip

TRAINERS = Path(__file__).parent / "trainers"
ROWS, RANKS = 203, 2
needs_accelerate = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
TIMM, YEAR_OLD = map(os.environ.get, ("KAITIAN_TEST_TIMM", "KAITIAN_TEST_YEAR_OLD"))
needs_timm = pytest.mark.skipif(not TIMM, reason="needs timm in the folder $KAITIAN_TEST_TIMM")
needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")
needs_hosts = pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())
needs_lightning = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")
thorough = pytest.mark.thorough


PACKAGES = {"accelerate": "", "transformers": ".trainer", "lightning": ".pytorch"}
# In one of its tests, it is loaded after the others.
OF_TRL = {"trl": ".trainer.sft_trainer"} if os.environ.get("KAITIAN_TEST_THOROUGH") != "no" else {}


@pytest.fixture(scope="module")
def server():
    parts = (PACKAGES | OF_TRL).items()
    with fork_server(*(name + part for name, part in parts if find_spec(name))) as path:
        yield path


@pytest.fixture(scope="module")
def year_old_server():
    names = [name + part for name, part in PACKAGES.items()]
    with fork_server(*names, PYTHONPATH=YEAR_OLD) as path:
        yield path


@pytest.fixture
def preloaded(server, monkeypatch):
    """Fork ranks of a process that has loaded the trainers, which takes longer than to train.

    A test of the Trainer, which loads Accelerate, does without, and with --all one of Lightning:
    there, they are loaded once their batches can be divided.
    """
    monkeypatch.setenv("KAITIAN_FORK_SERVER", server)


def run(mpirun, script, *options, adaptive=True, code=0, **more):
    flags = ["--emulate-slowdown", "1:3.0", "--backend-override", "gloo,nccl"]
    flags += ["--adaptive"] * adaptive
    return mpirun(RANKS, "kaitian-run", *flags, TRAINERS / script, *options, code=code, **more)


def found_in(ended):
    return json.loads(next(line for line in ended.out.splitlines() if line.startswith('{"')))


def train(mpirun, script, *options, difference=1e-9, rows=ROWS, **more):
    """Return what the script has found, after the checks that hold for all."""
    ended = run(mpirun, script, *options, adaptive="object" not in options, **more)
    assert ended.out.count("adaptive: batches of 16 rows over 2 ranks") == 1
    report = found_in(ended)
    # Equal ones, planned ones, and, if an epoch ends with a partial batch, that.
    assert report["splits"] >= 2 + (rows % 16 > 0)
    assert report["rows"] == report["distinct_rows"] == [rows, rows]  # each once an epoch
    assert report["difference"] < difference
    return report, ended.out


def test_a_loop_of_plain_torch_with_workers(mpirun):
    report, _ = train(mpirun, "resumed.py", "plain_ddp", "-1", "workers")
    assert report["steps"] == 2 * 13
    # An evaluation's batches are those of the script's own sampler.
    assert report["evaluated"] == [[8] * 12 + [6]] * 2


@thorough
@needs_timm
def test_timms_loaders_and_models(mpirun):
    report, out = train(
        mpirun, "timm_loop.py", TIMM, rows=12 * 16
    )  # it drops the last, partial batch
    assert "the loss is taken as the mean over rows" in out
    assert report["steps"] == 2 * 12
    assert report["evaluated"] == [[8] * 12 + [6]] * 2


@thorough
@pytest.mark.usefixtures("preloaded")
def test_batch_norm_over_the_rows_of_all_ranks_on_cpus(mpirun):
    train(mpirun, "resumed.py", "plain_ddp", "-1", "batch_norm")


@needs_accelerate
@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("object", "the loss is taken as the mean over rows"),
        pytest.param(
            *("language", "the loss of the model is the mean over labels after the first"),
            marks=thorough,
        ),
    ],
)
def test_a_loop_over_accelerate_with_accumulation(mpirun, kind, rule):
    report, out = train(mpirun, "accelerate_loop.py", kind)
    assert rule in out
    assert report["evaluated"] == [ROWS, ROWS]


@needs_accelerate
@pytest.mark.usefixtures("preloaded")
def test_a_robots_policy_in_the_shape_of_lerobots_loop(mpirun):
    """It calls `forward` by its name, where hooks of the model are not called."""
    report, _ = train(mpirun, "policy_loop.py")
    assert report["steps"] == 2 * 13
    assert report["average"] > 0


@needs_accelerate
@pytest.mark.parametrize(
    ("kind", "rule", "options"),
    [
        ("language", "a sum over rows", "2 2"),
        ("classifier", "the mean over rows", "1 0 object"),
        pytest.param("own", "a sum over rows", "2 0", marks=thorough),
        pytest.param("own_mean", "the mean over rows", "1 0", marks=thorough),
    ],
)
def test_hugging_faces_trainer(mpirun, kind, rule, options, request):
    if kind != "language":
        request.getfixturevalue("preloaded")
    report, out = train(mpirun, "hugging_face.py", kind, *options.split())
    assert f"the loss of the Trainer is {rule}" in out
    assert report["train_loss"] == pytest.approx(report["mean_loss"], rel=1e-6)
    assert ("multiplies the model's loss" in out) == (kind == "classifier")


@thorough
@needs_trl
@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_supervised_fine_tuning_by_trl(mpirun, loss_type):
    report, out = train(mpirun, "trl_sft.py", loss_type, difference=1e-7)
    assert "the loss of the Trainer is a sum over rows" in out
    assert report["train_loss"] == pytest.approx(report["mean_loss"], rel=1e-5)
    counted, tokens = report["tokens"]  # the comparison of the first batch counts none
    assert counted == tokens


@thorough
@needs_trl
@pytest.mark.usefixtures("preloaded")
def test_preferences_by_trl(mpirun):
    report, _ = train(mpirun, "trl_dpo.py", difference=1e-6)  # it computes in float32
    assert report["train_loss"] == pytest.approx(report["mean_loss"], rel=1e-5)


@thorough
@needs_trl
@pytest.mark.usefixtures("preloaded")
def test_rewards_by_trl_are_logged_over_the_rows_of_all_ranks(mpirun):
    report, _ = train(mpirun, "trl_reward.py", difference=1e-6)
    begin = 0
    for step, margin, accuracy in report["logged"]:
        means = [
            sum(report[name][begin:step]) / (step - begin) for name in ("margins", "accuracies")
        ]
        assert (margin, accuracy) == pytest.approx(means, rel=1e-5)
        begin = step
    assert begin == report["steps"]


@needs_lightning
@pytest.mark.parametrize("loaded", by_default(["before", "by the script"], ["before"]))
def test_a_lightning_module(mpirun, loaded, request):
    if loaded == "before":
        request.getfixturevalue("preloaded")
    report, out = train(mpirun, "resumed.py", "lightning", "-1", "object")
    assert report["evaluated"] == [8] + ([8] * 12 + [6]) * 2
    assert "the loss is taken as the mean over rows" in out
    total = sum(loss * rows for loss, rows in report["repeated"][13:])
    assert report["loss"] == pytest.approx(total / ROWS, rel=1e-6)


@thorough
@needs_lightning
@needs_hosts
@pytest.mark.usefixtures("preloaded")
def test_lightning_on_hosts_with_unequal_numbers_of_ranks(hosts, tmp_path):
    script = str(TRAINERS / "lightning_hosts.py")
    ranks = [f"{SCRIPTS}/kaitian-run", "--backend-override", "gloo,nccl", script]
    with HostsJob(hosts, "mpirun", "-np", "3", *ranks, cwd=tmp_path, fresh=False) as job:
        ended = job.finish()
    reports = [json.loads(line) for line in ended.out.splitlines() if line.startswith('{"')]
    assert [report["distinct_rows"] for report in reports] == [[ROWS]] * 3
    assert max(report["difference"] for report in reports) < 1e-9
    assert "prepared by [[0, 0, 0], [], [2, 2, 2]]" in ended.out  # by one rank of each host
    assert ended.out.count("leave out devices and num_nodes to train on all 3 ranks") == 1


@thorough
@pytest.mark.skipif(not YEAR_OLD, reason="needs releases in the folder $KAITIAN_TEST_YEAR_OLD")
@pytest.mark.parametrize(
    ("script", "options", "owned"),
    [
        ("hugging_face.py", "language 2 2", ""),
        ("trl_sft.py", "nll", "sharded"),
        ("resumed.py", "lightning -1", "sharded"),
        ("accelerate_loop.py", "object", ""),
        ("trl_sft.py", "nll", ""),
        ("resumed.py", "lightning -1", ""),
        ("accelerate_loop.py", "classifier", "sharded"),
        ("hugging_face.py", "language 2 2", "sharded"),
        ("hugging_face.py", "language 2 2", "whole"),
    ],
)
def test_trainers_of_a_year_ago(
    mpirun, year_old_server, monkeypatch, tmp_path, script, options, owned
):
    path = {"PYTHONPATH": f"{YEAR_OLD}:{TRAINERS.parents[2]}"}
    if script != "accelerate_loop.py":  # which loads it once its batches can be divided
        monkeypatch.setenv("KAITIAN_FORK_SERVER", year_old_server)
    name = "import accelerate; print(accelerate.__file__)"
    assert run_alone(PYTHON, "-c", name, cwd=tmp_path, **path).out.startswith(YEAR_OLD)
    if owned:
        ended = run_owned(mpirun, script, *options.split(), kind=owned, adaptive=True, **path)
        assert found_in(ended)["difference"] < 1e-7
    else:
        train(mpirun, script, *options.split(), difference=1e-7, **path)


@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize(
    ("trainer", "killed_at", "owned"),
    [
        pytest.param("plain_ddp", 19, "", marks=thorough),
        pytest.param("accelerate", 25, "", marks=[needs_accelerate, thorough]),
        pytest.param("hugging_face", 13, "", marks=[needs_accelerate, thorough]),
        pytest.param("lightning", 15, "", marks=[needs_lightning, thorough]),
        pytest.param("hugging_face", 13, "sharded", marks=needs_accelerate),
        pytest.param("plain_ddp", 19, "whole", marks=thorough),
        pytest.param("accelerate", 25, "whole", marks=[needs_accelerate, thorough]),
        pytest.param("lightning", 15, "sharded", marks=[needs_lightning, thorough]),
    ],
)
def test_a_supervised_trainer_resumes_by_itself_when_a_rank_is_killed(
    tmp_path, trainer, killed_at, owned
):
    options = "--adaptive --emulate-slowdown 1:3.0 --backend-override gloo,nccl".split()
    if owned:
        options += ["--layout", "shard", str(TRAINERS / "owned.py"), "3,1", owned]
    ranks = forked(["kaitian-run", *options, str(TRAINERS / "resumed.py"), trainer, str(killed_at)])
    supervised = f"kaitian-supervise mpirun -np {RANKS}".split()
    ended = run_alone(*supervised, *ranks, cwd=tmp_path, fresh=True)
    assert "kaitian-supervise: finished after 2 starts" in ended.err
    report = found_in(ended)
    assert report["steps"] == 2 * 13
    assert report["rows"] == report["distinct_rows"] == [ROWS, ROWS]
    assert report["splits"] > 2
    assert report["difference"] < 1e-9
    assert not list((tmp_path / "runs").iterdir())


@thorough
@needs_lightning
@pytest.mark.usefixtures("preloaded")
def test_endless_parts_of_a_stream_by_lightning(mpirun):
    """With unlike numbers of workers, which read ahead unlike numbers of batches."""
    ended = run(mpirun, "streams.py", "lightning")
    report = found_in(ended)
    assert report["steps"] == 20
    assert report["rows"] == [20 * 16]  # each batch is as large as the script's
    assert report["splits"] >= 2
    assert report["difference"] < 1e-9


@needs_accelerate
@pytest.mark.usefixtures("preloaded")
def test_a_stream_that_all_ranks_read_by_hugging_faces_trainer(mpirun):
    train(mpirun, "streams.py", "hugging_face")


@needs_accelerate
@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("accelerate_loop.py classifier split_batches", "leave out Accelerate's split_batches"),
        ("streams.py dispatched", "dispatch_batches: set it to False"),
        pytest.param(
            "accelerate_loop.py classifier dispatch_batches",
            "dispatch_batches: set it to False",
            marks=thorough,
        ),
    ],
)
def test_what_cannot_be_adapted_is_refused_in_a_line(mpirun, command, message):
    ended = run(mpirun, *command.split(), code=2)
    (line,) = [line for line in ended.err.splitlines() if "--adaptive" in line]
    assert message in line
    assert "Traceback" not in ended.err


def run_owned(mpirun, script, *options, ranks=RANKS, shares="3,1,2", kind="sharded", **more):
    """Run a script with layout shard, and owners by unequal shares."""
    flags = "--layout shard --backend-override gloo,nccl".split()
    flags += ["--adaptive", "--emulate-slowdown", "1:3.0"] * more.pop("adaptive", False)
    words = TRAINERS / "owned.py", shares, kind, TRAINERS / script, *options
    return mpirun(ranks, "kaitian-run", *flags, *words, **more)


OWNED = [
    ("hugging_face.py", "language 2 0", "sharded", True),
    ("resumed.py", "lightning -1", "whole", False),
]
FURTHER_OWNED = [
    ("accelerate_loop.py", "classifier", "sharded", False),
    ("hugging_face.py", "own 2 0", "whole", False),
    ("resumed.py", "lightning -1", "sharded", True),
    pytest.param("trl_sft.py", "nll", "sharded", True, marks=needs_trl),
    ("hugging_face.py", "language 2 0", "whole", False),
    ("hugging_face.py", "language 2 0", "sharded", False),
    ("hugging_face.py", "classifier 1 0", "sharded", True),
    ("accelerate_loop.py", "classifier", "whole", True),
    ("resumed.py", "plain_ddp -1 workers", "sharded", True),
    ("resumed.py", "lightning -1", "whole", True),
    ("resumed.py", "lightning -1", "sharded", False),
    pytest.param("trl_sft.py", "nll", "whole", False, marks=needs_trl),
]


@needs_accelerate
@needs_lightning
@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize(
    ("script", "options", "kind", "adaptive"),
    [
        *OWNED,
        *(
            pytest.param(
                *getattr(case, "values", case),
                marks=[*getattr(case, "marks", ()), thorough],
            )
            for case in FURTHER_OWNED
        ),
    ],
)
def test_trainers_whose_models_have_owners(mpirun, script, options, kind, adaptive):
    ended = run_owned(mpirun, script, *options.split(), kind=kind, adaptive=adaptive)
    assert ended.out.count(f"owners: [3.0, 1.0, 2.0], {kind}") == 1
    assert found_in(ended)["difference"] < 1e-7


@thorough
@needs_accelerate
@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize("kind", ["sharded", "whole"])
def test_a_checkpoint_of_owners_is_of_any_number_of_ranks(mpirun, tmp_path, kind):
    def difference(folder):
        one, other = (load_file(tmp_path / f / "final/model.safetensors") for f in ("one", folder))
        return max(float((one[name] - other[name]).abs().max()) for name in one)

    from safetensors.torch import load_file

    script = TRAINERS / "checkpointed.py"
    mpirun(1, PYTHON, script, "one", "12")
    run_owned(mpirun, script, "two", "6", kind=kind)
    mpirun(1, PYTHON, script, "resumed", "12", "two/checkpoint-3")
    run_owned(mpirun, script, "three", "4", "two/checkpoint-3", ranks=3, kind=kind)
    run_owned(mpirun, script, "fewer", "6", "three/checkpoint-5", kind=kind)
    assert difference("two") < 1e-14
    assert difference("resumed") < 1e-14
    assert difference("three") < 1e-8  # the Trainer divides by labels, in float32
    assert difference("fewer") < 1e-8


@needs_accelerate
@needs_lightning
@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize(
    ("trainer", "begins"),
    [
        ("lightning", "meta"),
        pytest.param("hugging_face", "", marks=thorough),
        pytest.param("hugging_face", "meta", marks=thorough),
        pytest.param("lightning", "", marks=thorough),
    ],
)
def test_a_model_of_four_times_the_smallest_device(mpirun, trainer, begins):
    flags = "--layout shard --emulate-memory 1:3MB --backend-override gloo,nccl".split()
    ended = mpirun(2, "kaitian-run", *flags, TRAINERS / "large.py", trainer, "256", "48", begins)
    (line,) = [line for line in ended.out.splitlines() if line.startswith("LOSSES")]
    size, *losses = line.removeprefix("LOSSES").replace("[", " ").replace("]", " ").split()
    assert int(size) > 4 * 3e6
    assert len(losses) == 3
    assert all(float(loss.strip(",")) < 3 for loss in losses)
    assert "layout shard: parameters, gradients and optimizer state by rank" in ended.out


DDP_LOOP = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(400, 400)
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters())
ddp(torch.ones(3, 400)).sum().backward()
if "reads" in sys.argv:
    model.weight.grad.norm()
if "replaces" in sys.argv:
    model.weight = torch.nn.Parameter(torch.ones(400, 400))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer.step()
print("stepped", flush=True)
"""


@pytest.mark.parametrize(
    ("memory", "line"),
    [
        ("", "a replica fits every rank, and is not clearly slower|a replica fits every rank, but"),
        ("--emulate-memory 1:1MB", "layout shard: a replica takes about "),
    ],
)
def test_the_layout_follows_from_the_memory_and_then_from_the_time(mpirun, memory, line):
    flags = f"--layout auto {memory} --backend-override gloo,nccl".split()
    ended = mpirun(2, "kaitian-run", *flags, "script.py", script=DDP_LOOP)
    assert len(re.findall(line, ended.out)) == 1
    (replicate,) = re.findall(r"\| replicate \| +(\S+) \|(.*)", ended.out)
    assert (replicate[0] == "-", "which has" in replicate[1]) == (bool(memory), bool(memory))
    assert ended.out.count("stepped") == 2


@pytest.mark.parametrize(
    ("mistake", "advice"),
    [
        ("reads", "use torch.nn.utils.clip_grad_norm_ or get_total_norm"),
        pytest.param(
            *("replaces", "again after parameters were added, removed or replaced; do that before"),
            marks=thorough,
        ),
    ],
)
def test_a_mistake_is_an_error_of_a_line(mpirun, mistake, advice):
    flags = "--layout shard --backend-override gloo,nccl".split()
    ended = mpirun(2, "kaitian-run", *flags, "script.py", mistake, script=DDP_LOOP, code=2)
    lines = {line for line in ended.err.splitlines() if "--layout shard" in line}
    assert len(lines) == 1
    assert advice in lines.pop()
    assert "Traceback" not in ended.err


FAILING_LOOP = """
import sys, torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters())
rows = TensorDataset(torch.ones(64, 4))

def fail(gradient):
    raise torch.OutOfMemoryError("no memory")

for number, (x,) in enumerate(DataLoader(rows, 4, sampler=DistributedSampler(rows))):
    is_failing = number == 2 and dist.get_rank() == 1
    try:
        if is_failing and sys.argv[1] == "forward":
            fail(None)
        output = ddp(x)
        if is_failing:
            model.weight.register_hook(fail)
        output.sum().backward()
        optimizer.step()
    except torch.OutOfMemoryError:
        pass
    optimizer.zero_grad()
"""


UNEQUAL_LOOP = """
import contextlib, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
first, second = (sys.argv[1], sys.argv[2])[dist.get_rank()].split(",")
for calls in first, second:
    for call in calls:
        if call == "s":
            optimizer.step()
            optimizer.zero_grad()
            continue
        with ddp.no_sync() if call == "a" else contextlib.nullcontext():
            ddp(torch.ones(1, 4)).sum().backward()
"""


@pytest.mark.parametrize(
    ("calls", "line"),
    [
        (
            ("abs,abs", "abs,aabs"),
            "after 1 optimizer steps the ranks come to different calls: backward() on rank 0, "
            "backward() under no_sync() on rank 1; give every rank as many micro-batches",
        ),
        pytest.param(
            ("bbs,bbs", "bbs,bs"),
            "calls: backward() on rank 0, optimizer.step() on rank 1; give every rank",
            marks=thorough,
        ),
        pytest.param(
            ("bs,bs", "bs,b"),
            "calls: optimizer.step() on rank 0, the script's end on rank 1; give every rank",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            ("bs,bs", "bs,bsa"),
            "calls: the script's end on rank 0, backward() under no_sync() on rank 1; give every",
            marks=thorough,
        ),
    ],
)
def test_unequal_micro_batches_are_refused_in_layout_shard(mpirun, calls, line):
    """Else gradients would be summed with values of the same size."""
    words = "--layout", "shard", "--backend-override", "gloo,nccl", "script.py", *calls
    ended = mpirun(2, "kaitian-run", *words, script=UNEQUAL_LOOP, code=2)
    assert ended.err.count(line) == 1
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("flags", "place", "line"),
    [
        ("--adaptive", "forward", "--adaptive: in step 3, rank 1 left out a batch that the others"),
        pytest.param(
            *("--adaptive", "backward", "--adaptive: the backward of step 3 has failed on rank 1"),
            marks=thorough,
        ),
        pytest.param(
            "--adaptive --layout shard",
            "forward",
            "--adaptive: in step 3, rank 1 left out a batch that the others",
            marks=thorough,
        ),
        pytest.param(
            "--adaptive --layout shard",
            "backward",
            "a backward has failed on rank 1 after 2 optimizer steps",
            marks=thorough,
        ),
        ("--layout shard", "backward", "a backward has failed on rank 1 after 2 optimizer steps"),
    ],
)
def test_a_batch_that_one_rank_fails_in_is_named(mpirun, flags, place, line):
    words = [*flags.split(), "--backend-override", "gloo,nccl", "script.py", place]
    ended = mpirun(2, "kaitian-run", *words, script=FAILING_LOOP, code=2)
    assert ended.err.count(line) == 1
    assert "Traceback" not in ended.err
