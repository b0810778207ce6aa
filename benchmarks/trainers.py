"""Compares a trainer's equal batches with those of `kaitian-run --adaptive`, in alternating jobs.

    python benchmarks/trainers.py [--pairs 5] [--trainers ddp,accelerate,huggingface,lightning]

Each job has two ranks, bound to a core each, and trains the same small language model with the
trainer's own loop. With a rank that is three times slower (emulated), the ratio is that of the
samples per second after step 30. Without one it is what `--adaptive` costs. Prints medians, with
the smallest and the largest.

    python benchmarks/trainers.py --best [--pairs 5]

compares the loop over DDP, from step 30 on, with the same loop with the best fixed split.

    python benchmarks/trainers.py --timm TRAIN_PY [--pairs 5]

compares equal and adaptive batches of timm's own train.py, on random images.

    python benchmarks/trainers.py --kills 10 [--owned whole|sharded] [--trainers …]

kills a rank at a random step of jobs under `kaitian-supervise`, whose scripts resume from their own
checkpoints, and compares the weights with those of one process. With `--owned`, in layout shard,
with shares 3:1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from kaitian_mpi.runtime.polling import wait_until

STEPS, SETTLED, ROWS = 90, 30, 16
IMAGE_STEPS, IMAGES = 60, 32  # of timm; its usual batches are larger still
LENGTH, VOCABULARY = 64, 256
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
RESUMED = Path(__file__).parents[1] / "tests/e2e/trainers/resumed.py"
RESUMED_NAMES = {"ddp": "plain_ddp", "huggingface": "hugging_face"}
SPLIT = os.environ.get("SPLIT", "")  # the rows of each rank
SPLITS = [f"{rows},{2 * ROWS - rows}" for rows in range(21, 28)]
TRAINERS = ("ddp", "accelerate", "huggingface", "lightning")


class Texts(Dataset):
    """Random texts of one length."""

    def __len__(self) -> int:
        """Return as many as all steps take."""
        return STEPS * ROWS * 2

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        """Return a text's bytes."""
        generator = torch.Generator().manual_seed(row)
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def language_model() -> nn.Module:
    """Return a model of transformers' that returns its loss."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
    )
    return AutoModelForCausalLM.from_config(config)


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean over the batch, as a script that has its own loss computes it."""
    logits = model(input_ids=batch["input_ids"]).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def train_ddp(model: nn.Module, times: list[float]) -> None:
    """Train by a loop of plain PyTorch, with a fixed split of the rows if there is one."""
    dist.init_process_group("gloo")
    data = Texts()
    if SPLIT:
        own = int(SPLIT.split(",")[dist.get_rank()])
        loader = DataLoader(data, batch_sampler=[range(own)] * STEPS)
    else:
        loader = DataLoader(data, ROWS, sampler=DistributedSampler(data))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in loader:
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()
        optimizer.step()
        times.append(time.perf_counter())


def train_accelerate(model: nn.Module, times: list[float]) -> None:
    """Train by a loop over Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(Texts(), ROWS, shuffle=True)
    )
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_of(wrapped, batch))
        optimizer.step()
        times.append(time.perf_counter())


def train_huggingface(model: nn.Module, times: list[float]) -> None:
    """Train by Hugging Face's Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Times(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=ROWS,
        num_train_epochs=1,
        report_to=[],
        save_strategy="no",
        logging_steps=20,
        disable_tqdm=True,
        use_cpu=True,
    )
    Trainer(model=model, args=arguments, train_dataset=Texts(), callbacks=[Times()]).train()


def train_lightning(model: nn.Module, times: list[float]) -> None:
    """Train by Lightning's Trainer."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_end(self, *_: Any) -> None:
            times.append(time.perf_counter())

    lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), DataLoader(Texts(), ROWS, shuffle=True))


def train(trainer: str) -> None:
    """Train as a rank; rank 0 prints the samples per second of the steps after `SETTLED`."""
    times: list[float] = []
    globals()[f"train_{trainer}"](language_model(), times)
    if dist.get_rank() == 0:
        steps = len(times) - 1 - SETTLED
        rate = steps * ROWS * dist.get_world_size() / (times[-1] - times[SETTLED])
        print(f"\n{json.dumps({'samples_per_sec': rate})}", flush=True)


def run(slowdown: bool, adaptive: bool, *script: str, **variables: str) -> str:
    """Return what one job has printed."""
    command = "mpirun -np 2 --map-by core --bind-to core kaitian-run --backend-override gloo,nccl"
    words = command.split() + ["--emulate-slowdown", "1:3"] * slowdown + ["--adaptive"] * adaptive
    ended = subprocess.run(
        [*words, *script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT | variables,
    )
    if ended.returncode:
        sys.exit(ended.stdout)
    return ended.stdout


def measure(trainer: str, slowdown: bool, adaptive: bool, split: str = "") -> float:
    """Return the samples per second of one job."""
    output = run(slowdown, adaptive, __file__, "--train", trainer, SPLIT=split)
    lines = [line for line in output.splitlines() if line.startswith('{"samples')]
    return float(json.loads(lines[0])["samples_per_sec"])


def measure_timm(script: str, images: str, slowdown: bool, adaptive: bool) -> float:
    """Return the samples per second of one job of timm's train.py."""
    options = (
        f"--data-dir {images} --model resnet10t --num-classes 2 --input-size 3 64 64 -b {IMAGES} "
        f"--workers 1 --log-interval {SETTLED} --epochs 1 --warmup-epochs 0 --device cpu "
        f"--output {images}/out"
    )
    output = run(slowdown, adaptive, script, *options.split())
    logged = re.findall(r"^Train: 0 \[ *(\d+)/.*?Time: .*?\(([\d.]+)s", output, re.M)
    seconds = {int(step) + 1: (int(step) + 1) * float(mean) for step, mean in logged}
    done, settled = IMAGE_STEPS, SETTLED + 1
    return 2 * IMAGES * (done - settled) / (seconds[done] - seconds[settled])


def write_images(folder: str) -> None:
    """Write the random images of a data set with two classes."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for kind, count in (("train", IMAGE_STEPS * IMAGES * 2), ("val", 2 * IMAGES)):
        for name in range(count):
            path = Path(folder, kind, str(name % 2), f"{name}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(256, size=(64, 64, 3), dtype=np.uint8)).save(path)


def show(name: str, pairs: Sequence[Sequence[float]]) -> None:
    """Print the samples per second of alternating jobs, and their ratios."""
    ratios = sorted(after / before for before, after in pairs)
    before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"  {name:12} {before:7.1f} -> {after:7.1f} samples/s, ratio "
        f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        flush=True,
    )


def compare_with_best(count: int) -> None:
    """Print how the adaptive loop compares with the best fixed split of the first round."""
    rates = {split: measure("ddp", True, False, split) for split in SPLITS}
    best = max(rates, key=lambda split: rates[split])
    pairs = [[measure("ddp", True, False, best), measure("ddp", True, True)] for _ in range(count)]
    show(f"ddp, {best}", pairs)


def kill(trainer: str, owned: str) -> tuple[float, float]:
    """Kill rank 1 of one job before a random step.

    Returns:
        The seconds from the kill to the next step, and the largest difference of a weight from
        that of one process; NaN unless each row was trained once an epoch.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = "kaitian-supervise mpirun -np 2 kaitian-run --adaptive --emulate-slowdown 1:3"
        words = [*command.split(), "--backend-override", "gloo,nccl"]
        if owned:
            words += ["--layout", "shard", str(RESUMED.with_name("owned.py")), "3,1", owned]
        words += [str(RESUMED), RESUMED_NAMES.get(trainer, trainer), str(random.randrange(1, 26))]
        rows, killed = Path(folder, "rows-0.jsonl"), Path(folder, "killed")
        with Path(folder, "output").open("w+") as output:
            job = subprocess.Popen(
                words, cwd=folder, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=output
            )
            wait_until(lambda: killed.exists() or job.poll() is not None)
            began = time.perf_counter()
            time.sleep(1)  # the other rank has ended, or cannot do another step
            before = rows.stat().st_size
            wait_until(lambda: rows.stat().st_size > before or job.poll() is not None)
            seconds = time.perf_counter() - began
            code = job.wait()
            output.seek(0)
            found = [json.loads(line) for line in output if line.startswith('{"')]
        if code or not found or found[0]["rows"] != found[0]["distinct_rows"]:
            return seconds, math.nan
        return seconds, found[0]["difference"]


def measure_kills(trainers: Sequence[str], count: int, owned: str) -> None:
    """Print a line per trainer."""
    for trainer in trainers:
        kills = [kill(trainer, owned) for _ in range(count)]
        seconds = sorted(each for each, _ in kills)
        equal = [difference for _, difference in kills if difference < 1e-9]
        print(
            f"{trainer:12} {len(equal)} of {count} kills survived with the weights of one process "
            f"(within {max(equal, default=math.nan):.0e}); next step after "
            f"{statistics.median(seconds):.1f} s ({seconds[0]:.1f} to {seconds[-1]:.1f})",
            flush=True,
        )


def main() -> None:
    """Print a line per trainer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--trainers", default=",".join(TRAINERS))
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--owned", default="", choices=("whole", "sharded"))
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--timm", default="", metavar="TRAIN_PY")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        return train(arguments.train)
    if arguments.kills:
        return measure_kills(arguments.trainers.split(","), arguments.kills, arguments.owned)
    if arguments.best:
        return compare_with_best(arguments.pairs)
    for slowdown in (True, False):
        print("one rank 3 times slower" if slowdown else "no slow rank", flush=True)
        with tempfile.TemporaryDirectory() as images:
            if arguments.timm:
                write_images(images)
                measures = {"timm": partial(measure_timm, arguments.timm, images)}
            else:
                names = arguments.trainers.split(",")
                measures = {name: partial(measure, name) for name in names}
            for name, rate in measures.items():
                pairs = [
                    [rate(slowdown, way) for way in (False, True)] for _ in range(arguments.pairs)
                ]
                show(name, pairs)


if __name__ == "__main__":
    main()
