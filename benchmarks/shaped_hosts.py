"""Emulated hosts whose links have a speed; see shared/emulated_hosts.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.emulated_hosts import EmulatedHosts, run, why_not
from shared.launch import AS_ROOT

_BURST = "128kb"  # more than the largest packet that the kernel hands to a link
_QUEUE = "50ms"


def why_not_shaped() -> str:
    """Return why links cannot be given a speed here; nothing where they can, or hosts cannot be."""
    if why_not():
        return why_not()
    if not shutil.which("tc"):
        return "needs tc"
    trial = f"kt{os.getpid()}"
    run("ip", "netns", "add", trial)
    try:
        shaped = subprocess.run(
            ["tc", "-n", trial, *_shape("lo", 1000)], capture_output=True, check=False
        )
    finally:
        run("ip", "netns", "del", trial)
    return "needs a kernel with the tbf queueing discipline" if shaped.returncode else ""


def _shape(link: str, mbit_per_sec: float) -> tuple[str, ...]:
    """Return the words for tc that limit what a link sends."""
    queue = ("tbf", "rate", f"{round(mbit_per_sec * 1e6)}bit", "burst", _BURST, "latency", _QUEUE)
    return ("qdisc", "replace", "dev", link, "root", *queue)


class ShapedHosts(EmulatedHosts):
    """Hosts whose links can be slowed; see `why_not_shaped`."""

    def start_ranks(
        self,
        command: Sequence[str],
        timeout_sec: int,
        environ: Mapping[str, str] = os.environ,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start a command on all slots, with the PYTHONPATH of `environ`; `options` as Popen's."""
        words = ["mpirun", "--timeout", str(timeout_sec), "-np", str(self.slots)]
        words += ["--hostfile", str(self.hostfile), "--bind-to", "none"]
        words += [word for name in (*AS_ROOT, "PYTHONPATH") for word in ("-x", name)]
        environ = {"PYTHONPATH": "", **environ, **dict.fromkeys(AS_ROOT, "1")}
        return subprocess.Popen(self.on_first(*words, *command), env=environ, text=True, **options)

    def set_link_speed(self, mbit_per_sec: float) -> None:
        """Limit the link of every host, in each direction, to a speed in 10^6 bits a second.

        A host that starts later has no limit.
        """
        for number in self._numbers:
            run("tc", "-n", self._namespace(number), *_shape("eth0", mbit_per_sec))
            run("tc", *_shape(self._link(number), mbit_per_sec))

    def lift_link_speed(self) -> None:
        """Undo `set_link_speed`."""
        for number in self._numbers:
            run("tc", "-n", self._namespace(number), "qdisc", "del", "dev", "eth0", "root")
            run("tc", "qdisc", "del", "dev", self._link(number), "root")


def print_over_link(
    command: Sequence[str], mbit_per_sec: float, begin: str, limit_sec: int
) -> None:
    """Run a Python script on two hosts, joined by links of this speed; print some of its lines.

    `command` is the script and its arguments. The lines are those that start with `begin`. Ends
    this process if hosts cannot be had, or if the job fails.
    """
    script = os.path.basename(command[0])
    if reason := why_not_shaped():
        sys.exit(f"{script}: {reason}")
    with (
        tempfile.TemporaryDirectory(prefix="kaitian-hosts-") as name,
        ShapedHosts(Path(name), [1, 1]) as hosts,
    ):
        hosts.set_link_speed(mbit_per_sec)
        words = [sys.executable, *command]
        with hosts.start_ranks(words, limit_sec, stdout=subprocess.PIPE) as job:
            assert job.stdout is not None
            for line in job.stdout:
                if line.startswith(begin):
                    print(f"{mbit_per_sec:g} Mbit/s: {line}", end="", flush=True)
        if job.returncode:
            sys.exit(f"{script}: the job ended with code {job.returncode}")
