import os
import subprocess
import sys
import time

import pytest

from kaitian_mpi.runtime.mpi_libraries import MPICH

LONGEST_SEC = 30

RANK = """
from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.abort import abort_on_error
with abort_on_error("kaitian-train"):
    raise UserError("found a mistake")
"""


def environment(numbers):
    """Return what MPICH's launcher gives a rank: its number, how many there are, and locally."""
    return {**os.environ, **dict(zip(MPICH.rank_variables, numbers, strict=True))}


def run(script, *arguments, numbers="0101"):
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(numbers))


@pytest.mark.parametrize("reads", [True, False])
def test_a_rank_ends_the_job_once_its_launcher_has_read_its_message_or_reads_nothing(reads):
    """A rank of two that finds a mistake before it has started MPI; the test is its launcher."""
    command, began = [sys.executable, "-c", RANK], time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment("0202")) as rank:
        if reads:
            with pytest.raises(subprocess.TimeoutExpired):
                rank.wait(1.0)
            assert rank.stderr.read() == b"kaitian-train: error: found a mistake\n"
        assert rank.wait(LONGEST_SEC) == 2
        assert reads or time.monotonic() - began > 1.5


ENDINGS = """
import io, os, sys
from kaitian_mpi.runtime.abort import abort_on_error

class Tee:  # without flush, as scripts have it
    def write(self, text):
        return len(text)

class Unshowable:
    def __str__(self):
        raise ValueError

def full():
    sys.stdout = open("/dev/full", "w")
    print("step 5")

def closed():
    sys.stdout = open(os.devnull, "w")
    sys.stdout.close()

def no_stderr():
    os.close(2)

def unwritable_stderr():
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)

def failing_hook():
    sys.excepthook = lambda *_: 1 / 0

def leaving_hook():
    sys.excepthook = lambda *_: sys.exit(0)

OUTPUTS = full, closed, no_stderr, unwritable_stderr, failing_hook, leaving_hook
OUTPUTS += lambda: setattr(sys, "stdout", Tee()), lambda: setattr(sys, "stdout", None)
CODES = 0, 1, 2, 255, 256, 257, -1, 2**63, 10**5000, -(10**5000), True, None, "text", Unshowable()

def code_of(work):
    child = os.fork()
    if child == 0:
        with abort_on_error("kaitian-run"):
            work()
        os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def after(prepare):
    prepare()
    raise ValueError("planted \\udcff")

codes = [code_of(lambda code=code: sys.exit(code)) for code in CODES]
print(codes, [code_of(lambda each=each: after(each)) for each in OUTPUTS])
"""


def test_whatever_its_exit_code_and_output_are_a_rank_ends_the_job():
    ended = run(ENDINGS)
    codes = [1, 1, 2, 255, 1, 1, 255, 1, 1, 1, 1, 1, 1, 1]
    assert ended.stdout == f"{codes} {8 * [1]}\n", ended.stderr
    assert "sys.exit(256) before the run was complete" in ended.stderr
    assert ended.stderr.count("ValueError: planted") == 6


HOOK = """
import atexit, sys, threading, time
from kaitian_mpi.runtime.abort import install_abort_hook

def own(kind, error, trace):
    print("theirs:", kind.__name__, file=sys.stderr)

atexit.register(print, "waits for other ranks")
threading.Thread(target=time.sleep, args=[10_000]).start()
if "before" in sys.argv:
    sys.excepthook = own
for _ in range(2):
    install_abort_hook()
if "after" in sys.argv:
    sys.excepthook = own
raise ValueError("planted")
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scripts_own_exception_hook_shows_the_exception_and_the_job_ends(when):
    ended = run(HOOK, when, numbers="1212")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.count("theirs: ValueError") == 1
    assert ("ending the job" in ended.stderr) == (when == "after")
    # An error that all ranks raise is one line.
    script = "from kaitian_mpi.runtime.abort import install_abort_hook; install_abort_hook()\n"
    script += "from kaitian_mpi.errors import AgreedError; raise AgreedError('planted')"
    ended = run(script, numbers="0202")
    assert (ended.returncode, ended.stderr) == (2, "-c: error: planted\n")
