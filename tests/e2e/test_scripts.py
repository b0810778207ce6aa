"""Users' scripts: the examples, and plain torch.distributed."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs import (
    ENVIRONMENT,
    PYTHON,
    fork_server,
    run_alone,
    summary_of,
    write_launching_program,
)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


# Runs an example whose benchmark takes a moment, where it would take up to ten.
SHORT = """
import functools, runpy, sys, kaitian_mpi

kaitian_mpi.Training = functools.partial(kaitian_mpi.Training, benchmark_seconds=0.2)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def example(name, *options):
    return PYTHON, "-c", SHORT, str(EXAMPLES / name), *options


def run_example(mpirun, ranks, name, *options):
    ended = mpirun(ranks, *example(name, *options))
    assert ended.err == ""
    return ended.out


def losses(out):
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", out)]


def number_after(words, out):
    return float(out.partition(words)[2].split()[0])


@pytest.mark.thorough
def test_gpt_learns_and_writes_text(mpirun):
    small = "--steps 20 --layers 2 --width 96 --emulate-kinds gpu,gpu,mlu".split()
    out = run_example(mpirun, 3, "gpt.py", *small)
    first, *_, last = losses(out)
    assert last < first - 1
    assert 5 < number_after("held-out perplexity", out) < 30
    assert len(out.partition("sample: ")[2].rstrip("\n")) > 150


@pytest.mark.thorough
def test_boxes_are_found_whatever_number_an_image_has(mpirun):
    out = run_example(mpirun, 2, "ragged_targets.py")
    assert float(re.search(r"size error (\S+) pixels", out)[1]) < 0.4


@pytest.mark.thorough
@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("transformers", "peft")),
    reason="needs the extra 'examples'",
)
def test_lora_learns_what_the_answers_look_like(mpirun, monkeypatch):
    with fork_server("peft", "transformers.models.llama.modeling_llama") as path:
        monkeypatch.setenv("KAITIAN_FORK_SERVER", path)
        ended = mpirun(2, *example("lora.py", "--epochs", "3"))
    assert "Traceback" not in ended.err  # the libraries may warn of each other
    assert "trained 17408 of 132416 parameters" in ended.out
    assert losses(ended.out)[0] > 6
    assert number_after("held-out perplexity", ended.out) < 10  # of 256 tokens


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, ["--layers", "3,1", "--emulate-kinds", "gpu,mlu"]),
        pytest.param(3, ["--batches", "2"], marks=pytest.mark.thorough),
    ],
)
def test_pipeline_stages_compute_what_the_whole_model_does(mpirun, ranks, options):
    out = run_example(mpirun, ranks, "pipeline_inference.py", *options)
    assert number_after("largest difference from the whole model:", out) < 1e-5
    assert re.search(r"[1-9]\d* samples/s", out)


@pytest.mark.thorough
def test_experts_on_several_ranks_learn_as_on_one(mpirun):
    epochs = "--epochs", "4"
    one = run_example(mpirun, 1, "expert_parallel.py", *epochs)
    command = example("expert_parallel.py", *epochs)
    three = mpirun(3, *command, KAITIAN_EMULATE_KINDS="gpu,mlu,mlu").out
    steps = [re.findall(r"^step (\d+) loss (\d+\.\d+)", out, re.M) for out in (one, three)]
    assert [number for number, _ in steps[0]] == ["1", "21", "41", "61"]
    assert steps[1] == steps[0]
    assert float(steps[0][-1][1]) < 0.7 * float(steps[0][0][1])
    for out in (one, three):
        tokens = out.partition("tokens by expert: ")[2].splitlines()[0].split()
        assert len(tokens) == 4
        assert sum(map(int, tokens)) == 512


@pytest.mark.thorough
def test_example_model_trains(mpirun):
    mpirun(
        2,
        *"kaitian-train --model examples.own_model:build --max-steps 2".split(),
        *"--benchmark-seconds 0.2".split(),
        PYTHONPATH=str(ROOT),
    )


@pytest.mark.thorough
def test_a_robots_policy_is_cloned_and_moves_the_arm(mpirun, tmp_path):
    command = "kaitian-train --task examples.behavior_cloning:build --epochs 4 --run-dir run"
    settings = "--set demonstrations=1024 --global-batch-size 64 --benchmark-seconds 0.2"
    mpirun(2, *f"{command} {settings}".split(), PYTHONPATH=str(ROOT))
    assert summary_of(tmp_path)["validation"]["error"] < 0.25  # 0.3, if it never moves
    script, weights = EXAMPLES / "behavior_cloning.py", "run/checkpoints/model.pt"
    ended = run_alone(PYTHON, str(script), weights, cwd=tmp_path)
    policy, known = map(int, re.findall(r"(\d+)%", ended.out))
    assert policy < known
    assert known > 80


def test_plain_torch_finds_the_backend_and_exits_without_output(mpirun, tmp_path):
    """Without importing kaitian_mpi and without destroy_process_group."""
    (tmp_path / "script.py").write_text(
        "import sys, torch, torch.distributed as dist\n"
        "assert 'mpi4py.MPI' not in sys.modules\n"
        "dist.init_process_group('kaitian', init_method='mpi://')\n"
        "work = dist.all_reduce(torch.ones(100_000), async_op=True)\n"
        "work.wait()\n"
        "print(dist.get_rank(), 'done')\n"
    )
    ended = mpirun(2, PYTHON, "script.py", fresh=True)
    assert sorted(ended.out.split()) == ["0", "1", "done", "done"]
    assert ended.err == ""


OF_ACCELERATE = """
import sys
from accelerate import Accelerator

found = Accelerator()
print(found.num_processes, found.process_index, found.mixed_precision, sys.argv[1:], flush=True)
"""


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
def test_a_script_of_accelerate_launch_has_its_ranks_and_settings(tmp_path):
    """By the command of docs/torchrun.md; on CPU ranks, Accelerate has to be told of the job."""
    (tmp_path / "train.py").write_text(OF_ACCELERATE)
    lines = (ROOT / "docs/torchrun.md").read_text().splitlines()
    (line,) = (each for each in lines if each.startswith("ACCELERATE_MIXED_PRECISION="))
    setting, *command = line.split()
    name, value = setting.split("=")
    program = write_launching_program(tmp_path / "bin", "kaitian-run")
    env = {name: value, "PATH": f"{program.parent}:{ENVIRONMENT['PATH']}"}
    ended = run_alone(*command, cwd=tmp_path, fresh=True, **env)
    expected = [f"2 {rank} bf16 ['--lr', '0.1']" for rank in range(2)]
    assert sorted(one for one in ended.out.splitlines() if one.startswith("2 ")) == expected


MISTAKE = """
import sys

import torch
from kaitian_mpi import Task, Training

data = [(torch.ones(3), torch.ones(1))] * 20
task = Task(
    model=torch.nn.Linear(3, 1),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    data=data,
    loss=lambda model, batch: (model(batch[0]) - batch[1]).square(),
)
for step in Training(task, global_batch_size=8, epochs=2, balance="off"):
    print(step)
"""


def test_a_mistake_in_a_script_is_one_line(mpirun):
    ended = mpirun(2, PYTHON, "script.py", code=2, script=MISTAKE)
    errors = [line for line in ended.err.splitlines() if "error: " in line]
    assert len(errors) == 1, ended.text
    assert errors[0].startswith("script.py: error: the loss is a tensor of shape [4, 1]; it must")
    assert "Traceback" not in ended.text
