"""How a rank ends by an error or a signal, in real processes, and saves before that."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

import kaitian_mpi
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.runtime import abort
from kaitian_mpi.runtime.mpi_libraries import MPICH
from kaitian_mpi.runtime.polling import wait_until

LONGEST_SEC = 120

RANK = """
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.runtime import abort
from kaitian_mpi.runtime.abort import abort_on_error
with abort_on_error("kaitian-train"):
    raise UserError("found a mistake")
"""


def environment(numbers):
    """Return what MPICH's launcher gives a rank: its number, how many there are, and locally."""
    return {**os.environ, **dict(zip(MPICH.rank_variables, numbers, strict=True))}


def run(script, *arguments, numbers="0101"):
    # Python 3.12 warns of threads at a fork.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, *arguments]
    pipes = {"capture_output": True, "text": True, "timeout": LONGEST_SEC}
    return subprocess.run(command, **pipes, env=environment(numbers))


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


WRONG_MODEL = "import kaitian_mpi; kaitian_mpi.Experts([], None)"


def test_a_mistake_in_a_model_that_is_made_before_anything_else_is_one_line():
    ended = run(WRONG_MODEL)
    assert ended.returncode == 2
    assert ended.stderr == "-c: error: Experts: there are no experts; give at least 1\n"


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


@pytest.mark.parametrize("speaks", [True, False])
def test_after_a_loss_a_silent_rank_lets_the_one_that_speaks_end_first(monkeypatch, capfd, speaks):
    waited = []
    monkeypatch.setattr(abort, "is_mpi_running", lambda: True)
    monkeypatch.setattr(abort, "_speaks_first", lambda: speaks)
    monkeypatch.setattr(abort.ulfm, "has_survived_loss", lambda: True)
    monkeypatch.setattr(abort, "exit_after_loss", sys.exit)
    monkeypatch.setattr(abort, "time", SimpleNamespace(sleep=waited.append))
    with pytest.raises(SystemExit) as ended:
        abort._abort_on("program", AgreedError("planted"))
    assert ended.value.code == 2
    assert bool(waited) != speaks
    assert capfd.readouterr().err == "program: error: planted\n" * speaks


def test_another_backend_is_named(monkeypatch):
    monkeypatch.setattr("kaitian_mpi.distributed.startup.install_abort_hook", lambda: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="initialized over gloo already; call"):
            kaitian_mpi.init()
    finally:
        dist.destroy_process_group()


FORKING_RANK = """
import os, signal, sys, time
from kaitian_mpi.runtime.signals import handle_signals
handle_signals("program")
ready, say_ready = os.pipe()
child = os.fork()
if child == 0:
    try:
        os.write(say_ready, b"x")
        while True:
            time.sleep(0.01)  # a pause might begin just after the signal
    except KeyboardInterrupt:
        os._exit(7)
    os._exit(9)
os.read(ready, 1)
os.kill(child, int(sys.argv[1]))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
time.sleep(0.3)  # in which the rank would end, were the signal its own
print("still there")
"""


@pytest.mark.parametrize(("number", "code"), [(15, -15), (2, 7)], ids=["SIGTERM", "SIGINT"])
def test_a_signal_to_a_forked_child_does_not_reach_the_rank(number, code):
    """The child has Python's default handlers, and the rank keeps running."""
    ended = run(FORKING_RANK, str(number))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [str(code), "still there"]


SIGNALED = """
import os, signal, sys, time
from kaitian_mpi.runtime import signals
from kaitian_mpi.runtime.signals import handle_signals, on_exit_signal
signals.write_to_launcher_stderr = lambda text: print(text, flush=True)
handle_signals("program")
with on_exit_signal(lambda: None, reports=sys.argv[1] == "first"):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
"""


@pytest.mark.parametrize(("place", "lines"), [("first", 1), ("later", 0)])
def test_the_first_rank_left_says_that_a_signal_ends_the_job(place, lines):
    ended = run(SIGNALED, place, numbers="2323")
    assert ended.stdout.count("terminated by SIGTERM") == lines, ended.stderr
    assert ended.returncode


OWN_HANDLERS = """
import os, signal, time
from kaitian_mpi.runtime import signals
from kaitian_mpi.runtime.signals import handle_signals, on_checkpoint_request
heard, asked = [], []
for name in ("SIGINT", "SIGUSR2"):  # as a parent may have had them
    signal.signal(getattr(signal, name), signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
reader, writer = os.pipe()
os.set_blocking(writer, False)
signal.set_wakeup_fd(writer)
for program in ("program", "again"):
    handle_signals(program)
def send(number, is_heard):
    os.kill(os.getpid(), number)
    until = time.monotonic() + 20
    while not is_heard() and time.monotonic() < until:
        time.sleep(0.01)
send(signal.SIGINT, lambda: True)
send(signal.SIGUSR1, lambda: heard)
send(signal.SIGUSR2, lambda: signals._unanswered)
with on_checkpoint_request(asked.append):
    print(heard == [signal.SIGUSR1], asked)
    send(signal.SIGUSR2, lambda: len(asked) == 2)
print(asked, os.read(reader, 9) == bytes([signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR2]))
signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
send(signal.SIGTERM, lambda: len(heard) == 2)
print("still there")
"""


def test_signals_that_a_program_handles_itself_stay_its_own():
    """One that the parent had ignored is no handler, but a Ctrl-C stays ignored."""
    ended = run(OWN_HANDLERS)
    assert ended.stdout.splitlines() == ["True [True]", "[True, True] True", "still there"]
    assert (ended.returncode, ended.stderr) == (0, "")


LONGEST_SEC = 120

# Its state is two numbers, which are equal except during an update.
SAVING_RANK = """
import os, sys, time
from pathlib import Path
from kaitian_mpi.runtime.signals import handle_signals, on_exit_signal
from kaitian_mpi.train.checkpoint.state_lock import StateLock
where, how = sys.argv[2:]
handle_signals("program")
lock, state, rank = StateLock(), [0, 0], os.getpid()
def save():
    if how == "waits":
        return f"step {state[0]} is not saved"
    time.sleep(1)
    Path(sys.argv[1]).write_text(f"{state[0]} {state[1]}")
    return f"step {state[0]} is saved"
after_fork = Path(f"{sys.argv[1]}-forked").touch
lock.set_exit_save(save, after_fork=after_fork, can_complete=lambda: how != "waits")
with on_exit_signal(lock.save, lock.interrupt):
    while True:
        with lock:
            state[0] += 1
            if where == "inside" and state[0] == 3:
                print("ready", flush=True)
                while os.getpid() == rank or how == "waits":  # as long as this process lives
                    time.sleep(0.01)
                if how == "fails":
                    raise ValueError("planted")
            state[1] += 1
        if where == "outside" and state[0] == 3:
            print("ready", flush=True)
            time.sleep(1000)
"""


def end(folder, where, how):
    """Run such a rank and end it once it has forked; return what it saved, and stderr.

    mpirun ends a rank a quarter of a second after the signal, however busy the machine is.
    """
    saved, has_forked = folder / "saved", folder / "saved-forked"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMPI_COMM_WORLD")}
    command, pipes = [sys.executable, "-c", SAVING_RANK, saved, where, how], [subprocess.PIPE] * 2
    options = {"text": True, "env": environment, "start_new_session": True}
    rank = subprocess.Popen(command, stdout=pipes[0], stderr=pipes[1], **options)
    assert rank.stdout.readline() == "ready\n"
    os.killpg(rank.pid, signal.SIGTERM)
    wait_until(has_forked.exists, LONGEST_SEC)
    for child in psutil.Process(rank.pid).children():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with suppress(psutil.NoSuchProcess):
                child.send_signal(number)  # as a batch system does, to every process of a job
    os.killpg(rank.pid, signal.SIGKILL)
    _, err = rank.communicate(timeout=LONGEST_SEC)  # the child holds stderr until it has saved
    return (saved.read_text() if saved.exists() else None), err


@pytest.mark.parametrize(
    ("where", "how", "state", "line"),
    [
        ("outside", "well", "3 3", "step 3 is saved"),
        ("inside", "well", "3 3", "step 3 is saved"),  # once the update is complete
        ("inside", "fails", None, "nothing could be saved: planted"),
        ("inside", "waits", None, "step 3 is not saved"),  # for other ranks, which are ended
    ],
)
def test_the_state_is_saved_even_if_the_rank_is_killed(tmp_path, where, how, state, line):
    saved, err = end(tmp_path, where, how)
    assert saved == state
    assert f"program: {line}" in err.splitlines()[-1 if state else 0 :]
