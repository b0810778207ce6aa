"""`bin/demo`, with less to train."""

import json
import re
import shlex
from pathlib import Path

import pytest
from jobs import PYTHON, forked, run_alone

from kaitian_mpi.cli import report

DEMO = str(Path(__file__).parents[2] / "bin/demo")
SHORT = (
    "--max-steps 3 --benchmark-seconds 0.5 --keep-all --no-parity --val-split 0.05 "
    "--log-interval 0".split()
)


def demo(*arguments, cwd, train):
    """Run it; `train` is the body of a function of bash that takes kaitian-train's place.

    The page that it makes at the end costs seconds, and the report's own tests make some: here,
    only its arguments are printed.
    """
    page = 'if [ "$1" = --text ]; then command kaitian-report "$@"; else printf "%q " "$@"; fi'
    env = {"BASH_FUNC_kaitian-train%%": train, "BASH_FUNC_kaitian-report%%": page}
    functions = {name: f"() {{ {body}; }}" for name, body in env.items()}
    return run_alone(DEMO, *map(str, arguments), cwd=cwd, fresh=True, **functions)


def test_arguments_are_passed_on(tmp_path):
    done = demo("--precision", "bf16", "--run-dir=a b", cwd=tmp_path, train='echo "$#: $*"')
    train = "-n 4 --model mobilenetv2 --devices cpu --global-batch-size 64 --epochs 3"
    assert f"14: {train} --precision bf16 --run-dir a b" in done.out
    assert "kaitian-report" not in done.out  # as nothing was trained


@pytest.mark.thorough
def test_mixed_compares_equal_with_adaptive_batches(tmp_path):
    ranks = shlex.join(forked([PYTHON])[:-1])
    done = demo(
        *("--mixed", *SHORT, "--run-dir", tmp_path / "runs"),
        cwd=tmp_path,
        train=f'command mpirun -np "$2" {ranks} kaitian-train "${{@:3}}"',
    )
    for name, balance in (("equal", "off"), ("adaptive", "adaptive")):
        folder = tmp_path / "runs" / name
        assert json.loads((folder / "config.json").read_text())["balance"] == balance
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["finished"]
        assert summary["emulated"]
        assert summary["device_kinds"] == ["gpu", "mlu"]
        assert f"{name}: finished, emulated devices" in done.out
    assert re.search(
        r"^adaptive: (\S+ times the rate of equal \(|the machine is too)", done.out, re.MULTILINE
    )
    last = report.make_parser().parse_args(shlex.split(done.out.splitlines()[-1]))
    assert last.run_dirs == [tmp_path / "runs" / name for name in ("equal", "adaptive")]
    assert last.output == tmp_path / "runs/report.html"
