"""Stands for a rank that `fork_server.py` forks: passes on its environment, signals and end.

Its name is `for-PID`, with that of the rank. It ends with its launcher, and the rank with it.

It does for any command what the package's `runtime/forked_rank.py` does for one, and shares nothing
with that: to import the package would make its start three times as long, in each test.

python -I -S forked_rank.py SOCKET COMMAND...
"""

import ctypes
import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress

PR_SET_PDEATHSIG = 1
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main():
    path, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    descriptors = [0, 1, 2]
    if "-c" in command:  # whose code names others
        numbers = map(int, os.listdir("/proc/self/fd"))
        descriptors += [number for number in numbers if number > 2 and is_open(number)]
    request = {
        "command": command,
        "descriptors": descriptors,
        "cwd": os.getcwd(),
        "environ": dict(os.environ),
        "blocked": sorted(blocked),
        "ignored": [each for each in FORWARDED if signal.getsignal(each) == signal.SIG_IGN],
        "cores": sorted(os.sched_getaffinity(0)),
        "launcher": os.getppid(),
        "pid": os.getpid(),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(path)
        socket.send_fds(server, [json.dumps(request).encode()], descriptors)
        rank = int(server.recv(32))
        with open("/proc/self/comm", "w") as name:
            name.write(f"for-{rank}")
        forward_signals(rank)
        code = int(server.recv(32))
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code in FORWARDED:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def is_open(descriptor):
    with suppress(OSError):  # that of the listing itself
        os.fstat(descriptor)
        return True
    return False


def forward_signals(group):
    """Send this process's signals to the rank's process group, as mpirun would."""

    def forward(number, _):
        with suppress(ProcessLookupError):
            os.killpg(group, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


main()
