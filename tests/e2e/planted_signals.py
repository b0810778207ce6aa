"""A script that evaluates averaged weights, and sends itself signals at chosen places.

    python planted_signals.py FOLDER [PLACE=SIGNAL ...]

The places are `made`, before the ranks are measured; `step:N`, after that step; and `swapped:N`, in
which the model has the averages that follow step N. OWN names a signal that it handles itself;
SLOW_DISK_SEC is how long the disk takes for each file. The run in FOLDER, which may be `none`, is
resumed; at its end the script prints the weights.
"""

import os
import signal
import sys
import time

import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import kaitian_mpi

FOLDER, *PLACES = sys.argv[1:]
SIGNALS = dict(place.split("=") for place in PLACES)


def send_signal_at(place):
    if name := SIGNALS.pop(place, None):
        os.kill(os.getpid(), signal.Signals[f"SIG{name}"])
        time.sleep(10 if name == "TERM" else 0.5)


def slow_down_disk(seconds):
    def fsync(descriptor, real=os.fsync):
        time.sleep(seconds)
        real(descriptor)

    os.fsync = fsync


average = None


def make_task():
    global average
    torch.manual_seed(0)
    inputs = torch.randn(24, 4, dtype=torch.float64)
    model = nn.Linear(4, 1).double()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    send_signal_at("made")
    return kaitian_mpi.Task(
        model=model,
        data=data,
        validation=data,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        metrics=lambda model, batch: {"loss": compute_loss(model, batch) * len(batch[0])},
        extra_state=average,
    )


def compute_loss(model, batch):
    return functional.mse_loss(model(batch[0]), batch[1])


def main():
    if name := os.environ.get("OWN"):
        signal.signal(signal.Signals[name], lambda *_: print("its own handler", flush=True))
    if seconds := float(os.environ.get("SLOW_DISK_SEC", 0)):
        slow_down_disk(seconds)
    settings = {
        "epochs": 4,
        "balance": "off",
        "global_batch_size": 4,
        "progress": "none",
        "keep_checkpoints": 99,
    }
    if FOLDER != "none":
        settings |= {"run_dir": FOLDER, "resume": "auto"}
    with kaitian_mpi.Training(make_task, **settings) as training:
        model = training.model
        for epoch in training.epochs():
            for batch in epoch:
                training.backward(compute_loss(training.model, batch))
                training.step()
                average.update_parameters(model)
                send_signal_at(f"step:{training.steps_done}")
            raw = [parameter.detach().clone() for parameter in model.parameters()]
            for parameter, averaged in zip(model.parameters(), average.parameters(), strict=True):
                parameter.data.copy_(averaged)
            training.evaluate()
            send_signal_at(f"swapped:{training.steps_done}")
            for parameter, value in zip(model.parameters(), raw, strict=True):
                parameter.data.copy_(value)
    print("finished", training.summary.finished, flush=True)
    print("weights", model.weight.flatten().tolist(), flush=True)


if __name__ == "__main__":
    main()
