"""Stands for a rank that `fork_server.py` forks: passes on its environment, signals and end.

python -I -S forked_rank.py SOCKET COMMAND...
"""

import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main():
    path, *command = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    request = {
        "command": command,
        "cwd": os.getcwd(),
        "environ": dict(os.environ),
        "cores": sorted(os.sched_getaffinity(0)),
        "launcher": os.getppid(),
        "pid": os.getpid(),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(path)
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        forward_signals(int(server.recv(32)))
        code = int(server.recv(32))
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code in FORWARDED:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def forward_signals(group):
    """Send this process's signals to the rank's process group, as mpirun would."""

    def forward(number, _):
        with suppress(ProcessLookupError):
            os.killpg(group, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


main()
