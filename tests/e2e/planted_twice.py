"""A script with two trainings, whose ranks on standby in the first one train in the second."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import kaitian_mpi
from kaitian_mpi.errors import UserError


def make_task():
    torch.manual_seed(0)
    return kaitian_mpi.Task(
        model=nn.Linear(3, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=list(torch.randn(40, 3)),
        loss=lambda model, batch: model(batch).square().mean(),
    )


def train(**settings):
    given = {"global_batch_size": 8, "epochs": 1, "balance": "off", **settings}
    with kaitian_mpi.Training(make_task(), **given) as training:
        steps = [step.number for step in training]
    return steps, training.summary.ranks, training.summary.finished


def main():
    world = kaitian_mpi.init()
    assert kaitian_mpi.init() is world
    try:
        kaitian_mpi.init(devices="cpu")
    except UserError as error:
        message = str(error)
    found = {"second": message, "standby": train(spares=1)}
    ones = torch.ones(1)
    dist.all_reduce(ones)
    found |= {"sum": ones.item(), "all": train()}
    assert kaitian_mpi.init().size == world.size
    dist.destroy_process_group()
    name = os.environ["OMPI_COMM_WORLD_RANK"]
    (Path(sys.argv[1]) / name).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
