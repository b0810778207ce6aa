"""What a user at a terminal sees of a job."""

import fcntl
import os
import re
import struct
import subprocess
import termios

from jobs import ENVIRONMENT, LONGEST_SEC, PLANTED, forked

COMMAND = (
    "kaitian-train --model planted:Telling --dataset planted:recorded_digits --epochs 4 "
    "--global-batch-size 144 --balance off --log-interval 0 --run-dir run"
)
FRAME = re.compile(r"\r\x1b\[2K((?:\x1b\[1A\x1b\[2K)*)")  # erases the last frame
CODES = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")


def run_in_terminal(words, cwd, columns, rows):
    """Run a command at a terminal; return its exit code and what was written to the terminal."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {**ENVIRONMENT, "TERM": "xterm-256color", "PYTHONPATH": str(PLANTED)}
    env.pop("CI", None)
    process = subprocess.Popen(
        ["setsid", "--ctty", *words],
        cwd=cwd,
        env=env,
        **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
    )
    os.close(slave)
    written = b""
    try:
        while data := os.read(master, 65536):
            written += data
    except OSError:  # the terminal's last process has ended
        pass
    code = process.wait(LONGEST_SEC)
    os.close(master)
    return code, written.decode()


def screen_of(written):
    """Return the lines that are left on a terminal, and the frames that were drawn on the way."""
    parts = FRAME.split(written)
    lines, frames = parts[0].split("\r\n"), []
    for ups, text in zip(parts[1::2], parts[2::2], strict=True):
        height = ups.count("A") + 1
        frames.append([CODES.sub("", line) for line in lines[-height:]])
        lines[-height:] = text.split("\r\n")
    return [CODES.sub("", line).rstrip() for line in lines], frames


def test_a_live_view_is_drawn_where_it_is_asked_for(tmp_path):
    """Rank 1 prints nothing: a line of another rank may be drawn over."""
    words = forked(
        ["mpirun", "--timeout", "200", "-np", "2", *COMMAND.split(), "--progress", "live"]
    )
    code, written = run_in_terminal(words, tmp_path, 80, 30)
    lines, frames = screen_of(written)
    text = "\n".join(lines)
    assert code == 0, text
    assert len(frames) > 5
    for frame in frames[1:]:
        assert frame[0].rstrip() == "kaitian-train run"
        assert [line.split()[0] for line in frame[1:-1]] == "epoch run loss rank 0 1".split()
        assert not frame[-1].strip()  # mpirun passes a row on only when it ends
    found = re.findall(r"^rank 0 computes (\d+)$", text, re.MULTILINE)
    # A copy of the model is tried before.
    assert [int(number) for number in found] == [1, *range(1, 41)]
    last = lines.index("kaitian-train run")
    assert lines[last + 1].endswith("100% step 40/40")
    assert re.match(r"finished after 4 epochs, 40 steps, in \d+:\d\d ", lines[last + 8])
    assert "of their combined speed" in text
    assert not re.search(r"^epoch \d/4 \| step", text, re.MULTILINE)  # no plain lines
    assert written.rpartition("\x1b[?25")[2].startswith("h")  # the cursor is visible
