"""PyTorch's own tests of a process group, between the ranks of one mpirun.

    mpirun -np 3 python -m pytest -s tests/mpi/torch_suite.py

They come with torch, which spawns processes for each test and knows its own backends by name. Here
the ranks of mpirun run one after the other, and what a test asks of gloo, kaitian does. With
`KAITIAN_SUITE_BACKEND=gloo`, it is gloo itself, for comparison.
"""

import importlib
import os
import sys
import types
import unittest
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from kaitian_mpi.distributed.startup import use_backend_for
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import share_cores
from kaitian_mpi.runtime.abort import die_with_launcher
from kaitian_mpi.runtime.lifecycle import initialize_mpi
from kaitian_mpi.runtime.polling import sleeping_barrier, wait_request

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own notes about its older parts

BACKEND = os.environ.get("KAITIAN_SUITE_BACKEND", "kaitian")
COMM = initialize_mpi().Dup()
# They compare the group's backend with the module's; elsewhere that only chooses what is tested.
OF_THE_NAME = ("test_get_backend", "test_Backend_enum_class")


def load_bodies():
    """Load the tests, for the ranks of this job."""
    # Without `expecttest`, which these tests do not use.
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase, stand_in.ACCEPT = unittest.TestCase, False
    with suppress(ImportError):
        stand_in = importlib.import_module("expecttest")
    sys.modules["expecttest"] = stand_in
    # The bodies' decorators read these at import.
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(COMM.size), MASTER_ADDR="127.0.0.1")
    os.environ.update(INIT_METHOD="file://", PYTORCH_PRINT_REPRO_ON_FAILURE="0")
    common_distributed = importlib.import_module("torch.testing._internal.common_distributed")
    # torch wants 8 ranks here; ranks 0 to 2 are all that these tests name.
    common_distributed.skip_if_small_worldsize = unittest.skipIf(COMM.size < 3, "needs 3 ranks")
    if BACKEND == "kaitian":
        use_backend_for(["gloo"])
    return importlib.import_module("torch.testing._internal.distributed.distributed_test")


def meet(wait_for=None, timeout=10):
    """Wait for all ranks; torch's own barrier looks for their files every 0.1 s."""
    assert wait_for in (None, COMM.size)
    if not wait_request(COMM.Ibarrier(), timeout):
        raise RuntimeError("barrier timeout")


die_with_launcher()
torch.set_num_threads(share_cores(COMM))
bodies = load_bodies()
bodies.Barrier.sync = meet
set_rng_seed = importlib.import_module("torch.testing._internal.common_utils").set_rng_seed
SKIPS = {skip.exit_code: skip.message for skip in bodies.TEST_SKIPS.values()}
BASES = bodies.TestDistBackend, bodies.DistributedTest._DistTestBase
CASE = type("TorchSuite", BASES, {"__test__": False})


@pytest.fixture
def folder(tmp_path):
    """A folder in which the ranks share files."""
    for name in ("test_dir", "init_dir"):
        (tmp_path / name).mkdir()
    yield gather_values(COMM, str(tmp_path))[0]
    sleeping_barrier(COMM)  # only after all are done: after a failure, what follows may hang
    if dist.is_initialized():
        dist.destroy_process_group()


def start_group(name, folder):
    bodies.BACKEND = BACKEND if name in OF_THE_NAME else "gloo"
    bodies.INIT_METHOD = f"file://{folder}/init_dir/shared_init_file"
    os.environ.update(TEMP_DIR=folder, INIT_METHOD=bodies.INIT_METHOD)
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"  # some tests leave another level
    dist.set_debug_level_from_env()
    where = {"init_method": "mpi://"}
    if BACKEND == "gloo":
        where = {"init_method": f"file://{folder}/store", "rank": COMM.rank}
        where["world_size"] = COMM.size
    seconds = bodies.CUSTOM_PG_TIMEOUT.get(name, bodies.default_pg_timeout)
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=seconds), **where)


@pytest.mark.parametrize("name", unittest.TestLoader().getTestCaseNames(CASE))
def test_of_torch(name, folder):
    method = getattr(CASE, name)
    if getattr(method, "__unittest_skip__", False):
        pytest.skip(method.__unittest_skip_why__)
    if BACKEND != "gloo" and "monitored_barrier" in name:
        pytest.skip("torch has it for groups of gloo alone")
    start_group(name, folder)
    meet()
    set_rng_seed(1234)  # torch 2.8 has no default; this is that of later releases
    case = CASE(name)
    case.rank, case.file_name = COMM.rank, f"{folder}/store"
    try:
        getattr(case, name)()
    except SystemExit as skipped:
        if skipped.code not in SKIPS:
            raise
        pytest.skip(SKIPS[skipped.code])
    case._barrier()
