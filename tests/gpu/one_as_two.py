"""Runs a script or a command in ranks of which NCCL takes each for one of another host.

NCCL refuses a GPU that two ranks of one host have; what a host is, `NCCL_HOSTID` says (utils.cc,
`getHostHash`). So one GPU shows what needs two, by NCCL's network transport.
"""

import os
import runpy
import shutil
import sys
from pathlib import Path

from kaitian_mpi.devices.accelerator import Accelerator

if __name__ == "__main__":
    rank = os.environ["OMPI_COMM_WORLD_RANK"]
    os.environ |= {"NCCL_HOSTID": rank, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    Accelerator.physical_id = lambda self, index: f"{index} of rank {rank}"
    sys.argv = sys.argv[1:]
    script = shutil.which(sys.argv[0]) or sys.argv[0]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
