"""A script whose ranks are killed at chosen places; each surviving rank writes what it has seen.

    python planted_survivor.py closed|open|epochs|run|several FOLDER [SETTING=VALUE ...]

KILLS names the places, such as `forward:3:1 ended:21:0`: in the forward of step 3 on rank 1, and
after the loop on rank 0. One such as `script:5:0=USR2` sends another signal there. Every second
step is followed by an evaluation; or each epoch, by that of the averaged weights and a step of the
schedule. LEAVES names the loops that are left, such as `steps:10 epochs:14`: an epoch's after step
10, and that over the epochs after step 14. Or there are several trainings, in which a rank that is
on standby in one takes part in the next.
"""

import copy
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import kaitian_mpi
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi import world as worlds
from kaitian_mpi.train import training as training_module
from kaitian_mpi.train.membership import Membership
from kaitian_mpi.train.saving import Saving

RANK = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
KILLS = os.environ.get("KILLS", "").split()
LEAVES = os.environ.get("LEAVES", "").split()
HAS_EXPERTS = bool(os.environ.get("MIXTURE"))
STEPS = 14

training = average = scheduler = None


def maybe_die(place, step=None):
    if step is None:
        last = training.last_step if training is not None else None
        step = last.number + 1 if last is not None else 1
    for kill in KILLS:
        where, _, name = kill.partition("=")
        if where == f"{place}:{step}:{RANK}":
            os.kill(os.getpid(), signal.Signals[f"SIG{name or 'KILL'}"])
            time.sleep(60 * (name == "TERM"))


class Model(nn.Sequential):
    forwards, poison = 0, math.inf
    """From the forward of this number on, the loss is not finite."""

    def forward(self, x):
        if self.training:
            self.forwards += 1
            time.sleep(0.01)
            maybe_die("forward")
        return super().forward(x)


class AdamW(torch.optim.AdamW):
    def step(self, *args, **kwargs):
        maybe_die("optimizer")
        return super().step(*args, **kwargs)


def open_training(form="closed", poison=math.inf, **settings):
    global average, scheduler
    torch.manual_seed(0)
    inputs = torch.randn(70, 6, dtype=torch.float64)
    data = list(zip(inputs, inputs.sin().sum(1, keepdim=True), strict=True))
    experts = [nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16)) for _ in range(5)]
    mixture = [kaitian_mpi.Experts(experts, nn.Linear(16, 5))] if HAS_EXPERTS else []
    model = Model(nn.Linear(6, 16), nn.Tanh(), *mixture, nn.Linear(16, 1)).double()
    model.poison = poison
    model[0].weight.register_hook(lambda _: maybe_die("backward"))
    optimizer = AdamW(model.parameters(), lr=0.02)
    scheduler = ExponentialLR(optimizer, 0.3)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    task = kaitian_mpi.Task(
        model=model, optimizer=optimizer, data=data[:56],
        loss=compute_loss if form in ("closed", "run") else None, clip_norm=1.0,
        validation=data[56:],
        metrics=measure, extra_state={"scheduler": scheduler, "average": average},
    )  # fmt: skip
    return kaitian_mpi.Training(task, **{"global_batch_size": 8, "balance": "off", **settings})


def compute_loss(model, batch):
    bad = model.training and model.forwards >= model.poison
    return functional.mse_loss(model(batch[0]), batch[1]) * (math.nan if bad else 1)


def measure(model, batch):
    maybe_die("evaluate")
    return {"loss": compute_loss(model, batch) * len(batch[0])}


def train_closed(seen):
    for step in training:
        seen["steps"].append(step.number)
        maybe_die("script", step.number)
        after_step(step.number, seen)


def train_open(seen):
    for batch in training.batches():
        loss = compute_loss(training.model, batch)
        maybe_die("loss")
        training.backward(loss)
        maybe_die("gradient")
        if training.step():
            seen["steps"].append(training.last_step.number)
            maybe_die("script", training.last_step.number)
            after_step(training.last_step.number, seen)
        else:
            seen["refused"] += 1
            training.evaluate()


def train_epochs(seen):
    for epoch in training.epochs():
        for batch in epoch:
            training.backward(compute_loss(training.model, batch))
            if training.step():
                average.update_parameters(training.model)
                seen["steps"].append(training.last_step.number)
                maybe_die("script", training.last_step.number)
            if f"steps:{training.steps_done}" in LEAVES:
                break
        weights = copy.deepcopy(training.model.state_dict())
        training.model.load_state_dict(average.module.state_dict())
        seen["evaluations"].append(training.evaluate()["loss"])
        training.model.load_state_dict(weights)
        maybe_die("between")
        training.evaluate()
        training.log(judged=training.steps_done)
        scheduler.step()
        maybe_die("after")
        if f"epochs:{training.steps_done}" in LEAVES:
            return


def after_step(step, seen):
    if step % 2 == 0:
        seen["evaluations"].append(training.evaluate()["loss"])


def recover(membership, error, _recover=Membership.recover):
    maybe_die("recovery")
    _recover(membership, error)


def limited_as(world, memory):
    maybe_die("making")
    return worlds.limited_as(world, memory)


def write_results(saving, _write=Saving.write_results):
    maybe_die("results")
    _write(saving)


def run_to_the_end(form, **settings):
    global training
    Saving.write_results, Membership.recover = write_results, recover
    training_module.limited_as = limited_as
    seen = {"steps": [], "refused": 0, "evaluations": []}
    training = open_training(form, **{"max_steps": STEPS, **settings})
    with training:
        trains = {"open": train_open, "closed": train_closed, "epochs": train_epochs}
        trains[form](seen) if form in trains else training.run()
        maybe_die("ended", STEPS)
        seen["end"] = training.evaluate()["loss"] if training.summary.finished else 0.0
    summary = training.summary
    seen |= {"finished": summary.finished, "ranks": summary.ranks}
    seen["lost"] = [[lost["rank"] for lost in loss["ranks"]] for loss in summary.failures]
    weights = training.model.state_dict()
    seen["weights"] = torch.cat(
        [w.flatten() for name, w in weights.items() if ".experts." not in name]
    ).tolist()
    seen["average"] = torch.cat([w.flatten() for w in average.parameters()]).tolist()
    seen["rate"] = scheduler.get_last_lr()
    return seen


def train_once(**settings):
    with open_training(epochs=1, parity=False, **settings) as training:
        steps = [step.number for step in training]
    return steps, training.summary.ranks, training.summary.finished


def leave_by_break():
    with open_training(epochs=1, spares=1) as training:
        for step in training:
            if step.number == 2:
                break
        result = training.evaluate()
    return result["loss"], training.model[0].weight.tolist(), training.summary.finished


def error_of(act, **settings):
    try:
        return act(**settings)
    except (UserError, ZeroDivisionError) as error:
        return str(error)


def leave_by_exception():
    """Only the active ranks raise it: the loop of one on standby ends."""
    with open_training(epochs=1, spares=1) as training:
        for _ in training:
            raise ZeroDivisionError("planted")
    return training.summary.finished


def train_several():
    world = kaitian_mpi.init()
    assert kaitian_mpi.init() is world
    results = {"second": error_of(kaitian_mpi.init, devices="cpu"), "standby": train_once(spares=1)}
    ones = torch.ones(1)
    dist.all_reduce(ones)
    results |= {"sum": ones.item(), "left": leave_by_break()}
    results["bad"] = error_of(train_once, poison=4, max_bad_steps=2, spares=1)
    results["all"] = train_once()
    assert kaitian_mpi.init().size == world.size
    if not KILLS:
        results["raised"] = error_of(leave_by_exception)
        if dist.is_initialized():  # not on the rank that stood by
            dist.destroy_process_group()
    return results


def main():
    form, folder, *settings = sys.argv[1:]
    pairs = (setting.split("=") for setting in settings)
    words = {"no": False}
    values = {n: int(value) if value.isdigit() else words.get(value, value) for n, value in pairs}
    seen = train_several() if form == "several" else run_to_the_end(form, **values)
    (Path(folder) / RANK).write_text(json.dumps(seen))
    if form == "several" and KILLS:
        # The ranks that are left end by an error that they share.
        for step in open_training(poison=4, max_bad_steps=2):
            maybe_die("several", step.number)


if __name__ == "__main__":
    main()
