"""Ranks of which one gives the communicator up while another one's long message is under way."""

import time
from contextlib import suppress

import torch
from mpi4py import MPI

import kaitian_mpi
from kaitian_mpi.mpi import pairwise
from kaitian_mpi.runtime import ulfm

world = kaitian_mpi.init()
comm = ulfm.track_comm(world.comm.Dup())
if world.rank == 0:
    sent, received = [None, torch.ones(1 << 20), None], [None, torch.ones(1 << 20), None]
    with suppress(MPI.Exception):
        pairwise.exchange(comm, sent, received)
elif world.rank == 1:
    time.sleep(1)  # it has not seen the message
else:
    time.sleep(0.3)
    comm.Revoke()
assert ulfm.agree(comm, ok=True)
print(f"rank {world.rank} goes on")
