"""What a user at a terminal sees of a job, on the screen that a pseudo terminal's bytes make."""

import fcntl
import os
import re
import struct
import subprocess
import termios

from jobs import ENVIRONMENT, LONGEST_SEC
from terminal_model import TerminalModel

TASK = """
import os
import sys
import time

import torch

from kaitian_mpi import Task

RANK = os.environ["OMPI_COMM_WORLD_RANK"]
seen = [0]


def build():
    torch.manual_seed(0)
    inputs = torch.randn(100, 4)
    data = [{"x": row, "y": row.sum()} for row in inputs]
    model = torch.nn.Linear(4, 1)

    def loss(model, batch):
        if model.training and torch.is_grad_enabled():
            seen[0] += 1
            time.sleep(0.1)  # the view is drawn less often on a busy machine
            print(f"rank {RANK} computes {seen[0]}", flush=True)
            print(f"rank {RANK} warns {seen[0]}", file=sys.stderr, flush=True)
        return (model(batch["x"])[:, 0] - batch["y"]).square().mean()

    def optimizer(model):
        return torch.optim.SGD(model.parameters(), lr=0.01)

    return Task(model=model, data=data, validation=data, loss=loss, optimizer=optimizer)
"""
COMMAND = (
    "kaitian-train --task noisy:build --epochs 4 --global-batch-size 10 --balance off "
    "--log-interval 0 --run-dir run"
)


def run_in_terminal(words, cwd, columns, rows):
    """Run a command at a terminal; return its exit code, its screen, and how each frame looked."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {**ENVIRONMENT, "TERM": "xterm-256color", "PYTHONPATH": str(cwd)}
    env.pop("CI", None)
    process = subprocess.Popen(
        ["setsid", "--ctty", *words],
        cwd=cwd,
        env=env,
        **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
    )
    os.close(slave)
    screen, frames = TerminalModel(columns, rows), []
    try:
        while data := os.read(master, 65536):
            for part in re.split(rb"(?<=\x1b8)", data):  # each frame ends so
                screen.feed(part)
                frames.append((screen.last, screen.lines()))
    except OSError:  # the terminal's last process has ended
        pass
    code = process.wait(LONGEST_SEC)
    os.close(master)
    return code, screen, frames


def test_a_live_view_stays_whole_whatever_the_ranks_print(tmp_path):
    (tmp_path / "noisy.py").write_text(TASK)
    words = ["mpirun", "--timeout", "60", "-np", "2", *COMMAND.split()]
    code, screen, frames = run_in_terminal(words, tmp_path, 80, 30)
    text = screen.text()
    assert code == 0, text

    views = [lines[last + 1 :] for last, lines in frames if last < 29]
    assert len(views) > 5
    for view in views[1:]:
        assert view[0].startswith("kaitian-train run ──")
        assert [line.split()[0] for line in view[1:]] == "epoch run loss rank 0 1".split()

    for rank in (0, 1):  # each line of each rank is there, in order, and as it was printed
        for word in ("computes", "warns"):
            found = re.findall(rf"^rank {rank} {word} (\d+)$", text, re.MULTILINE)
            assert [int(number) for number in found] == list(range(1, 41))
    left = [line for line in text.splitlines() if line.startswith("kaitian-train run ──")]
    assert len(left) == 1
    assert (screen.first, screen.last) == (0, 29)
    end = text[text.index(left[0]) :].splitlines()
    assert end[1].endswith("100%  step 40/40")
    assert re.match(r"finished after 4 epochs, 40 steps, in \d+:\d\d ", end[7])
    assert "of the sum of their speeds" in text
    assert "kaitian-report run shows the run" in text.replace("\n", "")
    assert re.search(r"^results in run$", text, re.MULTILINE)
    assert not re.search(r"^epoch \d/4 \| step", text, re.MULTILINE)  # no plain lines
