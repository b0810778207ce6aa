"""Runs checks on the ranks of a job, all of them whatever fails, and prints what each has found.

Rank 0 prints `NAME: ok, FIGURE` or `NAME: skipped, WHY` for each, and a rank that fails one
`NAME: FAIL, WHY`. A check that does not end is a failure that ends the job.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from shared import stand_in

from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import current_world

LONGEST_SEC = 200 if stand_in.KIND == stand_in.STAND_IN else 50
"""After which a check is taken to hang."""
_PATIENCE_SEC = 15  # with the others, once one rank has failed

Check = Callable[[Any], str]
"""Takes the world, and returns the figures that it has found. Collective over all ranks."""


class SkippedError(Exception):
    """The check cannot be made here; says why."""


class FailedError(Exception):
    """What was found is wrong; says what."""


def run_checks(world: Any, checks: Sequence[Check], longest_sec: float = LONGEST_SEC) -> bool:
    """Run checks one after the other; return whether none has failed. Collective."""
    is_good, comm = True, world.comm.Dup()  # which what a check has left undone does not disturb
    for check in checks:
        with Watch(check.__name__, world.rank, longest_sec) as watch:
            kind, text = _verdict(check, world)
            if kind == "FAIL":  # the others may wait for this rank
                print(f"{check.__name__}: FAIL, rank {world.rank}: {text}", flush=True)
                watch.end_within(min(longest_sec, _PATIENCE_SEC))
            left = remaining(world)
            found = gather_values(comm if left.size == world.size else left.comm, kind)
        is_good = is_good and "FAIL" not in found
        if left.rank == 0 and "FAIL" not in found:
            print(f"{check.__name__}: {', '.join(filter(None, (kind, text)))}", flush=True)
    if remaining(world).rank == 0:
        print("all checks were run", flush=True)
    return is_good


def remaining(world: Any) -> Any:
    """Return the world without the ranks that were lost."""
    return current_world() or world


class Watch:
    """The context of what must end; else it prints where every thread is, and ends the process."""

    def __init__(self, name: str, rank: int, seconds: float) -> None:
        self._name, self._rank, self._seconds = name, rank, seconds
        self._timer = threading.Timer(0, lambda: None)

    def __enter__(self) -> Watch:
        self.end_within(self._seconds)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    def end_within(self, seconds: float) -> None:
        """Give it so many seconds from now on."""
        self._timer.cancel()
        self._timer = threading.Timer(seconds, self._give_up)
        self._timer.daemon = True
        self._timer.start()
        faulthandler.dump_traceback_later(seconds + 5, exit=True)  # if no thread of Python runs

    def _give_up(self) -> None:
        faulthandler.dump_traceback(all_threads=True)
        print(f"{self._name}: FAIL, rank {self._rank} does not get on", flush=True)
        os._exit(1)


def _verdict(check: Check, world: Any) -> tuple[str, str]:
    try:
        return "ok", check(world)
    except SkippedError as reason:
        return "skipped", str(reason)
    except FailedError as reason:
        return "FAIL", str(reason)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        text = " ".join(str(error).split())
        return "FAIL", f"{type(error).__name__}: {text[:300]}"
    finally:
        with suppress(Exception):
            world.synchronize()
            world.device_kind.release_cached_memory()


def expect(is_right: bool, figure: str) -> str:
    """Return the figure if it is right.

    Raises:
        FailedError: it is not.
    """
    if not is_right:
        raise FailedError(figure)
    return figure


def expect_on_hardware(is_right: bool, figure: str) -> str:
    """Do the same for what a stand-in says nothing about, such as times, where it is skipped."""
    if stand_in.KIND == stand_in.STAND_IN:
        raise SkippedError(f"as it says nothing about a GPU ({figure})")
    return expect(is_right, figure)


def check_plain(world: Any) -> None:
    """Skip what needs tensors with memory that torch knows, unlike a stand-in's."""
    is_plain = type(torch.empty(1, device=world.device)) is torch.Tensor
    if not all(gather_values(world.comm, is_plain)):
        raise SkippedError("the stand-in's tensors have a class of their own")


class Memory:
    """What torch's allocator says of a rank's accelerator, in bytes."""

    def __init__(self, world: Any) -> None:
        """Raises `SkippedError` on every rank if a rank's accelerator does not say it."""
        names = ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats")
        has_host = world.device_kind.is_host
        module = None if has_host else torch.get_device_module(world.device.type)
        can_say = has_host or all(hasattr(module, name) for name in names)
        if not all(gather_values(world.comm, can_say)):
            raise SkippedError("the stand-in does not count its memory")
        self._module, self._index = module, world.device.index

    def allocated(self) -> int:
        return self._module.memory_allocated(self._index) if self._module else 0

    def peak(self) -> int:
        """Return the most that was allocated since `restart`."""
        return self._module.max_memory_allocated(self._index) if self._module else 0

    def restart(self) -> None:
        if self._module:
            self._module.synchronize(self._index)
            self._module.reset_peak_memory_stats(self._index)


def delay(world: Any, seconds: float) -> None:
    """Keep this rank's device busy for so long, from its current stream's next place on."""
    if stand_in.KIND == stand_in.STAND_IN:
        import fake_device  # which has a path only there

        fake_device.current_stream().give(lambda: time.sleep(seconds))
    elif world.device.type == "cuda":
        torch.cuda._sleep(int(seconds * _cycles_per_sec()))
    else:
        raise SkippedError(f"{world.device.type} has no kernel that only waits")


_cycles: list[float] = []


def _cycles_per_sec() -> float:
    if not _cycles:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1000)
        begin.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        end.synchronize()
        _cycles.append(20_000_000 / (begin.elapsed_time(end) / 1e3))
    return _cycles[0]
