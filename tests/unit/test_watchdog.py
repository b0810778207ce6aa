"""The watchdog: its decisions as tables, and its effects on real processes."""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime import start_watch_process as watching
from kaitian_mpi.runtime.lifecycle import start_limit
from kaitian_mpi.runtime.polling import wait_until
from kaitian_mpi.runtime.watchdog import StepLimit, first_step_limit, setup_limit
from kaitian_mpi.runtime.watchdog_process import Heartbeat, kill_reason, newest_report, parse_stat

LONGEST_SEC = 120

RANK = """
import os, sys, time
from kaitian_mpi.runtime.watchdog import Watchdog
watchdog = Watchdog("[2@host]", {limit}{options})
print(os.getpid(), watchdog._process.pid, flush=True)
{body}
"""
STEPS = """
while True:
    for phase in ("forward", "backward", "update"):
        watchdog.enter(phase, step=12)
        time.sleep(0.01)
"""


def report(beat=0.0, limit=60, since=0.0, waits=0, allowed=None, step="12", phase="forward"):
    allowed = limit if allowed is None else allowed
    return f"{beat} {limit} {since} {allowed} {waits} {step} {phase}".encode()


# decisions ------------------------------------------------------------------------------------


def test_verdicts_on_a_rank_by_its_newest_report_and_the_state_of_its_process():
    for now, line, restarted, state, reason in (
        (60.0, report(), 0, "S", None),
        (61.0, report(), 0, "T", "no heartbeat for 61 s (stopped), last in forward of step 12"),
        (61.0, report(allowed="inf"), 0, "t", "no heartbeat for 61 s (stopped by a debugger)"),
        (61.0, report(waits=1), 0, "D", "no heartbeat for 61 s (blocked in the kernel)"),
        (61.0, report(), 0, "R", "(running, but a call holds the GIL)"),
        (61.0, report(beat=60), 0, "T", "61 s in forward of step 12 (stopped), the limit is 60 s"),
        (61.0, report(beat=60), 0, "S", "61 s in forward of step 12, the limit is 60 s (--step-t"),
        (0.6, report(beat=0.5, limit=0.5), 0, "R", "0.6 s in forward of step 12, the limit is 0.5"),
        (61.0, report(beat=60, step=""), 0, "R", "61 s in forward, the limit is 60 s"),
        (1800.0, report(beat=1800, allowed=1800), 0, "R", None),
        (1801.0, report(beat=1801, allowed=1800), 0, "R", "step 12, the limit is 1800 s (--step-"),
        (9999.0, report(beat=9999, allowed="inf", waits=1), 0, "S", None),
        (125.0, report(beat=125, waits=1), 0, "S", None),
        (126.0, report(beat=126, waits=1), 0, "S", "126 s waiting for other ranks in forward of"),
        (9999.0, report(), 9999, "S", None),
        (9999.0, report(beat=9999), 9939, "S", None),
        (9999.0, report(beat=9999), 9938, "S", "61 s in forward"),
        (9999.0, report(limit="inf"), 0, "S", None),
        (61.0, report(beat=62, since=62), 0, "S", None),
    ):
        kill = kill_reason(now, Heartbeat(line), restarted, state)
        assert kill == reason if reason is None else reason in kill
    for now, line, state, reason in (  # a stopped one may have a limit of its own
        (3.0, report(), "T", None),
        (4.0, report(), "T", "no heartbeat for 4.0 s (stopped), last in forward of step 12"),
        (4.0, report(allowed="inf"), "T", "no heartbeat for 4.0 s (stopped)"),
        (4.0, report(), "t", None),
        (4.0, report(), "R", None),
        (3.0, report(limit=2), "T", "no heartbeat for 3.0 s (stopped)"),
    ):
        kill = kill_reason(now, Heartbeat(line), 0, state, stopped_limit=3)
        assert kill == reason if reason is None else reason in kill
    newest = newest_report(None, [report(beat=1), report(beat=2, phase="backward")])
    assert (newest.where, newest.beat) == ("backward of step 12", 2)
    assert newest_report(newest, []) is newest
    wrong = report(limit=0), report(limit="nan"), report(beat="soon")
    for line in (b"", b"\xff\x00\xfe", report()[:9], *wrong):
        assert newest_report(None, [line]) is None
        assert newest_report(newest, [line]) is newest
    assert parse_stat(b"7 (python) S 5 7 7 0 -1") == ("S", 5)
    assert parse_stat(b"7 (a) T 9 (b) T 5 7 7") == ("T", 5)
    assert parse_stat(b"7 (a b\nc)) R 1 7") == ("R", 1)


def test_the_limit_follows_the_median_of_recent_steps():
    def after(limit, *steps):
        return [limit.observe(sec) or limit.limit_sec for sec in steps]

    assert after(StepLimit(7), 1000) == [7]
    limit = StepLimit(0)
    assert after(limit, 1, 3.5, 3.5, 3.5, 1000) == [60] * 5  # 70 s: 17% more
    assert after(limit, 10, 10, 10) == [60, 60, pytest.approx(20 * 6.75)]
    assert after(limit, *[6.8] * 49) == [pytest.approx(135)] * 49
    # 60 s in the end: 18% less than 73.
    assert after(limit, *[0.5] * 50) == [pytest.approx(135)] * 24 + [pytest.approx(73)] * 26
    assert after(StepLimit(0, warm_up=3), 1, 1, 1) == [600, 600, 60]
    assert after(StepLimit(0, warm_up=3), 100, 1) == [2000, 2000]
    for step_limit, first, setup in ((0, 600, 1800), (3, 3, 60)):  # before any step is timed
        assert (first_step_limit(step_limit), setup_limit(step_limit)) == (first, setup)
        assert StepLimit(step_limit).limit_sec == first


# real processes -------------------------------------------------------------------------------


class Rank:
    """A process with a watchdog, and the output of both."""

    def __init__(self, body: str, limit: float = 0.5):
        self.process = start(RANK.format(limit=limit, options=", follow_launcher=False", body=body))
        self.pid, self.watchdog = map(int, read_line(self.process).split())

    def wait(self) -> tuple[int, str, str]:
        """Return the exit code and the output; fail if rank or watchdog keeps running."""
        out, err = self.process.communicate(timeout=LONGEST_SEC)
        assert wait_until(lambda: is_gone(self.watchdog), LONGEST_SEC)
        return self.process.returncode, out, err


def read_line(process: subprocess.Popen) -> str:
    """Return the next line; not by `stdout`, for what that reads ahead `communicate` would miss."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(process.stdout.fileno(), 1)
        assert byte, line
        line += byte
    return line.decode()


def start(script: str) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", script], text=True, **pipes)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_up(watchdog: int) -> None:
    # The kernel keeps 15 letters.
    def is_up():
        return psutil.Process(watchdog).name() == "kaitian-watchdo"

    assert wait_until(is_up, LONGEST_SEC)


@pytest.fixture
def rank():
    with contextlib.ExitStack() as stack:

        def begin(*args) -> Rank:
            started = Rank(*args)
            stack.callback(started.process.communicate, timeout=LONGEST_SEC)
            stack.callback(started.process.kill)  # does nothing to one that has ended
            return started

        yield begin


AGAIN = """
watchdog.enter("the script", step=2, limited=False)
ended = watchdog.phase
watchdog.enter("the script", step=3, limited=False)
watchdog.renew(ended, 0.1)
time.sleep(0.9)
watchdog.renew(watchdog.phase, 2.5)
time.sleep(60)
"""
CLOSED = """
began = time.monotonic()
watchdog.close(), watchdog.close()
watchdog.enter("after"), watchdog.set_limit(1)
assert time.monotonic() - began < 20
assert not os.path.exists(f"/proc/{watchdog._process.pid}")
"""
FULL = """
import signal
def enter_often():
    began = time.monotonic()
    for step in range(100_000):
        watchdog.enter("forward", step=step)
    assert time.monotonic() - began < 20
os.kill(watchdog._process.pid, signal.SIGSTOP)
enter_often()
os.kill(watchdog._process.pid, signal.SIGCONT)
time.sleep(0.3)
watchdog.enter("update", step=7)
time.sleep(0.3)
os.kill(watchdog._process.pid, signal.SIGKILL)
watchdog._process.wait()
enter_often()
"""
FORWARD, READING = "watchdog.enter('forward', step=3)\n", "watchdog.enter('r', limited=False)\n"


@pytest.mark.parametrize(
    ("body", "limit", "message"),
    [
        (f"{FORWARD}while True: pass", 0.5, "in forward of step 3, the limit is 0.5 s (--st"),
        # re does not release the GIL, and never ends here.
        (
            f"import re\n{FORWARD}re.match('(a*)*b', 'a' * 60)",
            *(0.5, "(running, but a call holds the GIL), last in forward of step 3"),
        ),
        # Waiting, start-up and reading may exceed the limit, for which a busy machine does not
        # keep a rank from its heartbeats.
        ("time.sleep(5)\nwatchdog.close()", 4, ""),
        ("watchdog.enter('the sum', waits=True)\ntime.sleep(5)\nwatchdog.close()", 4, ""),
        (f"{READING}time.sleep(5)\nwatchdog.close()", 4, ""),
        # A new limit applies to the current phase, and to the heartbeats: with 60 s one a second.
        (
            f"{FORWARD}time.sleep(0.6)\nwatchdog.set_limit(0.9)\ntime.sleep(60)",
            *(60, "in forward of step 3, the limit is 0.9 s"),
        ),
        (f"{READING}time.sleep(0.2)\nwatchdog.set_limit(4)\ntime.sleep(5)", 60, ""),
        # A phase that begins again may get a limit of its own, unless it has ended.
        (AGAIN, 2, "in the script of step 3, the limit is 2.5 s"),
        (CLOSED, 0.5, ""),
        # A full pipe or a dead watchdog does not block the rank.
        pytest.param(FULL, 2, "", marks=pytest.mark.serial),
    ],
)
def test_a_rank_that_hangs_is_killed_and_no_other(body, limit, message, rank):
    code, out, err = rank(body, limit).wait()
    if not message:
        assert (code, out, err) == (0, "", "")
        return
    assert code == -signal.SIGKILL
    assert err.startswith("[2@host] killed by its watchdog: ")
    assert message in err
    assert err.count("\n") == 1


BUSY = """
began = time.monotonic()
while time.monotonic() - began < 2:
    for _ in range(20):
        watchdog.enter("forward", step=12)
    time.sleep(0.01)
"""


def test_a_busy_rank_survives_and_its_watchdog_uses_no_cpu(rank):
    busy = rank(BUSY, 1)
    wait_until_up(busy.watchdog)
    watchdog = psutil.Process(busy.watchdog)
    before, began = sum(watchdog.cpu_times()[:2]), time.monotonic()
    time.sleep(1.5)
    used = sum(watchdog.cpu_times()[:2]) - before
    assert used < 0.05 * (time.monotonic() - began)
    assert "kaitian-watchdog" in watchdog.cmdline()
    assert os.getpgid(busy.watchdog) == os.getpgid(busy.pid)
    assert busy.wait() == (0, "", "")


FORKS = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads at a fork
worker = os.fork()
if worker == 0:
    os.close(1), os.close(2)
    time.sleep(60)
    os._exit(0)
print(worker, flush=True)
"""


def test_a_forked_worker_does_not_hold_the_watchdog(rank):
    killed = rank(FORKS + STEPS)
    worker = int(read_line(killed.process))
    os.kill(killed.pid, signal.SIGKILL)
    try:
        assert killed.wait() == (-signal.SIGKILL, "", "")
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_watchdog_stopped_together_with_its_rank_restarts_its_timer(rank):
    frozen = rank("watchdog.enter('forward', step=12)\nprint('entered', flush=True)\n" + STEPS, 0.7)
    assert read_line(frozen.process) == "entered\n"
    wait_until_up(frozen.watchdog)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which it ignores
        os.kill(frozen.watchdog, number)
    os.kill(frozen.pid, signal.SIGSTOP)
    os.kill(frozen.watchdog, signal.SIGSTOP)
    time.sleep(1)
    os.kill(frozen.watchdog, signal.SIGCONT)
    time.sleep(0.1)
    assert frozen.process.poll() is None
    os.kill(frozen.pid, signal.SIGCONT)
    time.sleep(0.8)
    assert frozen.process.poll() is None
    os.kill(frozen.pid, signal.SIGSTOP)
    code, _, err = frozen.wait()
    assert code == -signal.SIGKILL
    assert re.fullmatch(
        r"\[2@host\] killed by its watchdog: no heartbeat for \d+(\.\d)? s \(stopped\), last in "
        r"(forward|backward|update) of step 12\n",
        err,
    )


@pytest.mark.parametrize("follows", [True, False])
def test_a_rank_ends_with_its_launcher_if_configured(follows):
    seconds = 60 if follows else 0.8
    body = f"watchdog.enter('r', limited=False)\ntime.sleep({seconds})\nprint('left', flush=True)"
    script = RANK.format(limit=1, options=f", follow_launcher={follows}", body=body)
    launcher = start(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {script!r}])")
    pid, watchdog = map(int, read_line(launcher).split())
    wait_until_up(watchdog)
    launcher.kill()
    out, err = launcher.communicate(timeout=LONGEST_SEC)
    assert wait_until(lambda: is_gone(pid) and is_gone(watchdog), LONGEST_SEC)
    told = "[2@host] killed by its watchdog: its launcher has exited, last in r\n"
    assert (out, err) == (("", told) if follows else ("left\n", ""))


BLOCKED = """
reader, writer = os.pipe()
os.set_blocking(writer, False)
try:
    while os.write(writer, b"x" * 4096): pass
except BlockingIOError:
    os.set_blocking(writer, True)
os.dup2(writer, 2)
unheard = Watchdog("[3@host]", 0.5, follow_launcher=False)
watchdog.close()
unheard.enter("forward")
time.sleep(60)
"""


def test_a_blocked_stderr_does_not_delay_the_kill(rank):
    assert rank(BLOCKED).wait()[0] == -signal.SIGKILL


def test_the_watchdog_imports_little():
    script = "import sys, kaitian_mpi.runtime.watchdog; print({'torch', 'mpi4py'} & {*sys.modules})"
    assert start(script).communicate(timeout=LONGEST_SEC) == ("set()\n", "")


LAUNCHER = """
import os, subprocess, sys
from kaitian_mpi.runtime import start_watch_process as watching
names = "JOB", "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"
for rank in range({ranks}):
    words = [sys.executable, "-c", {rank!r} if rank == 0 else "import time; time.sleep(60)"]
    values = "1", str(2 - rank), "3", str(rank), "3"
    process = subprocess.Popen(words, env=os.environ | dict(zip(names, values)))
    print(process.pid, flush=True)
process.wait()
sys.stdin.read()
"""
WATCHED = """
import os, subprocess, sys, time
words = "-c", "import sys; from kaitian_mpi.runtime import start_watch_process as watching; {body}"
names = "JOB", "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"
pids = str(os.getpid()), str(os.getppid())
watch = [sys.executable, *words, "[2@host]", *pids, "LIMIT=600", "address", "OF_MPI_", *names]
process = subprocess.Popen(watch, stdin=subprocess.PIPE)
{then}
time.sleep(60)
"""
HASTY = "watching._INTERVAL_SEC = watching._PATIENCE_SEC = watching._ALL_END_SEC = 0.2; "
RUNS = "watching.main(*sys.argv[1:])"


@pytest.mark.linux("processes are found in /proc")
@pytest.mark.parametrize(
    ("ended", "then", "line"),
    [
        (2, "", "[2@host] rank 0 of this host ended before MPI started; see what it printed; end"),
        pytest.param(
            *(0, "", "[2@host] this rank ended before MPI started; ending the job"),
            marks=pytest.mark.thorough,
        ),
        # One that was never there: the others have the other numbers.
        pytest.param(
            *(None, "", "[2@host] rank 0 of this host ended before MPI started"),
            marks=pytest.mark.thorough,
        ),
        (2, "process.stdin.write(b'1'); process.stdin.flush(); process.wait()", None),
    ],
)
def test_a_rank_that_ends_before_mpi_has_started_ends_the_job(ended, then, line):
    rank = WATCHED.format(body=HASTY + RUNS, then=then)
    script = LAUNCHER.format(rank=rank, ranks=2 if ended is None else 3)
    words = [sys.executable, "-c", script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **pipes) as launcher:
        pids = [int(launcher.stdout.readline()) for _ in range(2 if ended is None else 3)]
        try:
            is_watched = wait_until(lambda: len(psutil.Process(pids[0]).children()) == 1, 20)
            assert is_watched or then
            time.sleep(1)
            if ended is not None:
                os.kill(pids[ended], signal.SIGKILL)
            if line is None:
                with pytest.raises(subprocess.TimeoutExpired):
                    launcher.wait(2)
            else:
                assert launcher.wait(LONGEST_SEC) == -signal.SIGTERM
        finally:
            for pid in (*pids, launcher.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert line is None or line in launcher.stderr.read()


def others_after(capfd, monkeypatch, told, limit_sec=600.0, seconds=3000):
    """Return the fault that mpirun's answers lead to, when, and what is shown."""
    monkeypatch.setattr(watching.OtherHosts, "_ask", lambda self: told)
    monkeypatch.setattr(watching.time, "monotonic", lambda: 100.0)
    others = watching.OtherHosts("[0@node-a]", f"KAITIAN_START_TIMEOUT={limit_sec}")
    for waited in range(0, seconds, 2):
        if fault := others.fault(100.0 + waited, [0, 1]):
            break
    return fault, waited, capfd.readouterr().err


def ranks_on(**states):
    """Return the answer of mpirun for two ranks on each host, the first of them here."""
    hosts = {host.replace("_", "-"): state for host, state in states.items()}
    return {
        2 * index + number: (host, state)
        for index, (host, state) in enumerate(hosts.items())
        for number in range(2)
    }


def test_ranks_of_other_hosts_that_have_ended_are_named_and_slow_ones_waited_for(
    capfd, monkeypatch
):
    run = functools.partial(others_after, capfd, monkeypatch)
    told = ranks_on(node_a="connected", node_b="running", node_c="ended", node_d="ended")
    fault, waited, shown = run(told)
    assert fault.startswith("ranks 4-5 on node-c and ranks 6-7 on node-d ended before MPI started")
    assert 15 <= waited < 30
    assert not shown
    fault, _, shown = run(ranks_on(node_a="ended", node_b="running"))  # its own are seen otherwise
    assert not fault
    assert shown == (
        "[0@node-a] has waited 60 s for all ranks to start MPI; ranks 2-3 on node-b still run "
        "without having started it\n"
    )
    fault, waited, shown = run({})
    assert "within 600 s" in fault
    assert "KAITIAN_START_TIMEOUT" in fault
    assert 600 < waited < 620
    assert "or are still starting; the job ends after 600 s (KAITIAN_START_TIMEOUT)" in shown
    fault, _, shown = run({}, limit_sec=0)
    assert not fault
    assert shown.endswith("or are still starting\n")


@pytest.mark.parametrize(
    ("own", "late", "limit_sec", "fault_at", "line"),
    [
        (0, {2: "S"}, 600, None, "of this host, rank 6 is still running without having done so"),
        (0, {2: "T"}, 600, 602, "of this host, rank 6 is stopped"),
        (0, {2: "T"}, 0, None, "of this host, rank 6 is stopped"),
        (1, {2: "T"}, 600, None, ""),  # the first rank tells
        (1, {0: "S", 2: "T"}, 600, 602, "rank 4, rank 6 is still running"),
        (0, {}, 600, None, ""),
    ],
)
def test_ranks_of_this_host_that_have_not_begun_to_start_mpi_are_named(
    capfd, monkeypatch, own, late, limit_sec, fault_at, line
):
    monkeypatch.setattr(watching.time, "monotonic", lambda: 100.0)
    siblings = SimpleNamespace(
        world_ranks={0: 4, 1: 5, 2: 6},
        late=lambda: late,
        names_of=lambda numbers: ", ".join(f"rank {number + 4}" for number in numbers),
    )
    ranks = watching.LateRanks(siblings, "[4@host]", own, limit_sec)
    faults = [(at, ranks.fault(100.0 + at)) for at in range(0, 700, 2)]
    faulty = [(at, fault) for at, fault in faults if fault]
    assert (faulty[0][0] if faulty else None) == fault_at
    assert not faulty or "rank 6 of this host is stopped, and has not started MPI" in faulty[0][1]
    shown = capfd.readouterr().err
    assert shown.count("has waited 62 s for all ranks to start MPI") == bool(line)
    assert line in shown


def test_the_wait_for_ranks_that_nothing_is_known_of_is_a_number_of_seconds():
    for text, limit_sec in (("", 600), ("90", 90), ("0", 0), (" 1.5 ", 1.5)):
        assert start_limit({"KAITIAN_START_TIMEOUT": text}) == limit_sec
    for text in ("1 h", "-1", "inf", "nan"):
        with pytest.raises(UserError, match=f"seconds .0: no limit., not '{text}'"):
            start_limit({"KAITIAN_START_TIMEOUT": text})
