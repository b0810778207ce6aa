"""PyTorch's own tests of a process group, between the ranks of one mpirun.

    mpirun -np 3 python tests/mpi/torch_suite.py --backend kaitian

They come with torch, which spawns processes for each test and knows its own backends by name. Here
the ranks of mpirun run one after the other, and what a test asks of gloo the chosen backend does.

A test that hangs, or that ends its rank, ends the run.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
import types
import unittest
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import share_cores
from kaitian_mpi.runtime.abort import die_with_launcher, write_labelled
from kaitian_mpi.runtime.lifecycle import initialize_mpi
from kaitian_mpi.runtime.polling import sleeping_barrier, wait_request

_BODIES = "torch.testing._internal.distributed.distributed_test"
# They compare the group's backend with the module's; elsewhere that only chooses what is tested.
_OF_THE_NAME = ("test_get_backend", "test_Backend_enum_class")
_GRACE_SEC = 2  # for the other ranks' stacks, before rank 0 ends the job

Line = dict[str, Any]


def main() -> None:
    """Run the command."""
    options = _make_parser().parse_args()
    warnings.simplefilter("ignore")  # torch's own notes about its older parts
    comm = initialize_mpi().Dup()
    die_with_launcher()
    suite = Suite(comm, options.backend, options.quiet)
    results = []
    for name in suite.names():
        if not re.search(options.k, name):
            continue
        last = 0 if comm.rank else _GRACE_SEC
        faulthandler.dump_traceback_later(options.limit + last, exit=not comm.rank)
        results.append(suite.run(name))
        faulthandler.cancel_dump_traceback_later()
    count = {result: results.count(result) for result in sorted({*results})}
    _print_once(comm, f"{options.backend}, {comm.size} ranks: {count}")
    sys.exit(1 if count.get("fail") else 0)


class Suite:
    """The test bodies, bound to the ranks of `comm`."""

    def __init__(self, comm: Any, backend: str, quiet: bool) -> None:
        """Load the test bodies, for groups of `backend`. Collective."""
        self._comm, self._backend, self._quiet = comm, backend, quiet
        # The bodies' decorators read these at import.
        os.environ.update(BACKEND="gloo", WORLD_SIZE=str(comm.size), MASTER_ADDR="127.0.0.1")
        os.environ.update(INIT_METHOD="file://", PYTORCH_PRINT_REPRO_ON_FAILURE="0")
        _stand_in_for_expecttest()
        import torch
        from torch.testing._internal import common_distributed

        torch.set_num_threads(share_cores(comm))
        # torch wants 8 ranks here; ranks 0 to 2 are all that these tests name.
        common_distributed.skip_if_small_worldsize = unittest.skipIf(comm.size < 3, "needs 3 ranks")
        if backend == "kaitian":
            from kaitian_mpi.distributed.startup import use_backend_for

            use_backend_for(["gloo"])
        self._bodies = importlib.import_module(_BODIES)
        self._bodies.Barrier.sync = self._sync
        base, tests = self._bodies.TestDistBackend, self._bodies.DistributedTest._DistTestBase
        self._case = type("TorchSuite", (base, tests), {})
        self._skips = {s.exit_code: s.message for s in self._bodies.TEST_SKIPS.values()}

    def names(self) -> list[str]:
        """Return the tests' names."""
        return list(unittest.TestLoader().getTestCaseNames(self._case))

    def run(self, name: str) -> str:
        """Run one test on all ranks; print and return the result: pass, fail or skip."""
        began = time.monotonic()
        folder = self._fresh_folder()
        result = self._agree(name, began, self._attempt(name, lambda: self._body(name, folder)))
        # Only after the result is known: after a failure this may hang.
        end = self._agree(name, began, self._attempt(name, self._tear_down), only_failure=True)
        if self._comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        return "fail" if end == "fail" else result

    def _attempt(self, name: str, what: Callable[[], None]) -> Line:
        line: Line = {"test": name, "result": "pass", "why": ""}
        try:
            what()
        except (Exception, SystemExit) as error:
            code = getattr(error, "code", None)
            if isinstance(error, unittest.SkipTest) or code in self._skips:
                line.update(result="skip", why=self._skips.get(code, str(error)))
            else:
                line.update(result="fail", why=f"{type(error).__name__}: {error}")
                line.update(rank=self._comm.rank, trace=traceback.format_exc())
                write_labelled(line["trace"])  # now, and here: the other ranks may hang
        line["seconds"] = time.monotonic()
        return line

    def _agree(self, name: str, began: float, own: Line, *, only_failure: bool = False) -> str:
        sleeping_barrier(self._comm)
        order = ("fail", "pass", "skip")
        # The first failure causes the others, which are timeouts.
        line = min(
            gather_values(self._comm, own),
            key=lambda line: (order.index(line["result"]), line["seconds"]),
        )
        if line["result"] == "fail" or not only_failure:
            line["seconds"] = round(line["seconds"] - began, 1)
            who = f"rank {line['rank']}: " if "rank" in line else ""
            why = who + line["why"].partition("\n")[0]
            took = f"{line['seconds']:5.1f} s"
            if line["result"] == "fail" or not self._quiet:
                _print_once(self._comm, f"{line['result']} {took}  {name}  {why}".rstrip())
        return line["result"]

    def _body(self, name: str, folder: str) -> None:
        method = getattr(self._case, name)
        if getattr(method, "__unittest_skip__", False):
            raise unittest.SkipTest(method.__unittest_skip_why__)
        import torch.distributed as dist
        from torch.testing._internal.common_utils import set_rng_seed

        bodies = self._bodies
        bodies.BACKEND = self._backend if name in _OF_THE_NAME else "gloo"
        bodies.INIT_METHOD = f"file://{folder}/init_dir/shared_init_file"
        os.environ.update(TEMP_DIR=folder, INIT_METHOD=bodies.INIT_METHOD)
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"  # some tests leave another level
        dist.set_debug_level_from_env()
        seconds = bodies.CUSTOM_PG_TIMEOUT.get(name, bodies.default_pg_timeout)
        where: Line = {"init_method": "mpi://"}
        if self._backend == "gloo":
            where = {"init_method": f"file://{folder}/store"}
            where.update(rank=self._comm.rank, world_size=self._comm.size)
        dist.init_process_group(self._backend, timeout=timedelta(seconds=seconds), **where)
        bodies.Barrier.sync()
        set_rng_seed(1234)  # torch 2.8 has no default; this is that of later releases
        case = self._case(name)
        case.rank, case.file_name = self._comm.rank, f"{folder}/store"
        getattr(case, name)()
        case._barrier()

    def _sync(self, wait_for: int | None = None, timeout: float = 10) -> None:
        """Wait for all ranks; torch's own barrier looks for their files every 0.1 s. Collective."""
        assert wait_for in (None, self._comm.size)
        if not wait_request(self._comm.Ibarrier(), timeout):
            raise RuntimeError("barrier timeout")

    def _tear_down(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    def _fresh_folder(self) -> str:
        """Create the folder in which the tests share files. Collective."""
        folder = tempfile.mkdtemp() if self._comm.rank == 0 else ""
        for name in ("test_dir", "init_dir") if folder else ():
            Path(folder, name).mkdir()
        return gather_values(self._comm, folder)[0]


def _stand_in_for_expecttest() -> None:
    """Let torch's test cases load without `expecttest`, which these tests do not use."""
    module: Any = types.ModuleType("expecttest")
    module.TestCase, module.ACCEPT = unittest.TestCase, False
    with suppress(ImportError):
        module = importlib.import_module("expecttest")
    sys.modules["expecttest"] = module


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backend", choices=("kaitian", "gloo"), default="kaitian")
    add("-k", default="", metavar="REGEX", help="only tests whose name has it")
    add("--quiet", action="store_true", help="print only the tests that fail, and the counts")
    add("--limit", type=float, default=60, metavar="SEC", help="for one test (60)")
    return parser


def _print_once(comm: Any, text: str) -> None:
    if comm.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
