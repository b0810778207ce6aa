"""A script with several trainings; a rank that is on standby in one takes part in the next.

    python planted_twice.py FOLDER [lost]

Each rank writes what it has seen. With `lost`, rank 0 is then killed, and the others end by an
error that they share.
"""

import json
import math
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import kaitian_mpi
from kaitian_mpi.errors import UserError

RANK = os.environ["OMPI_COMM_WORLD_RANK"]


def make_task(poison=math.inf):
    """Return a task whose loss is not finite from its forward number `poison` on."""
    torch.manual_seed(0)
    forwards = 0

    def loss(model, batch):
        nonlocal forwards
        forwards += model.training
        return model(batch).square().mean() * (math.nan if forwards > poison else 1)

    return kaitian_mpi.Task(
        model=nn.Linear(3, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=list(torch.randn(40, 3)),
        loss=loss,
        validation=list(torch.randn(8, 3)),
    )


def open_training(poison=math.inf, **settings):
    given = {"global_batch_size": 8, "epochs": 1, "balance": "off", "parity": False, **settings}
    return kaitian_mpi.Training(make_task(poison), **given)


def train(**settings):
    with open_training(**settings) as training:
        steps = [step.number for step in training]
    return steps, training.summary.ranks, training.summary.finished


def leave_by_break():
    with open_training(spares=1) as training:
        for step in training:
            if step.number == 2:
                break
        result = training.evaluate()
    return result["loss"], training.model.weight.tolist(), training.summary.finished


def end_by_shared_error(**settings):
    try:
        train(poison=3, max_bad_steps=2, **settings)
    except UserError as error:
        return str(error)


def leave_by_exception():
    """Only the active ranks raise it: the loop of one on standby ends."""
    try:
        with open_training(spares=1) as training:
            for _ in training:
                raise ZeroDivisionError
    except ZeroDivisionError:
        return "raised"
    return training.summary.finished


def lose_rank_0(training):
    for step in training:
        if step.number == 2 and RANK == "0":
            os.kill(os.getpid(), signal.SIGKILL)


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
    found |= {"sum": ones.item(), "left": leave_by_break(), "bad": end_by_shared_error(spares=1)}
    found["all"] = train()
    assert kaitian_mpi.init().size == world.size
    if "lost" not in sys.argv:
        found["raised"] = leave_by_exception()
        if dist.is_initialized():  # not on the rank that stood by
            dist.destroy_process_group()
    (Path(sys.argv[1]) / RANK).write_text(json.dumps(found))
    if "lost" in sys.argv:
        lose_rank_0(open_training(poison=3, max_bad_steps=2))


if __name__ == "__main__":
    main()
