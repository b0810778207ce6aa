"""A character-level GPT in the shape of nanoGPT's train.py: iterations, random windows.

mpirun -np 2 python examples/conversions/gpt.py
"""

import argparse
import inspect
import math
import time

import torch
from torch import nn
from torch.nn import functional

from kaitian_mpi import Task, Training, init

out_dir = "out"
eval_interval, eval_iters, log_interval = 50, 10, 10
gradient_accumulation_steps, batch_size, block_size = 4, 8, 32
learning_rate, min_lr, warmup_iters = 3e-3, 3e-4, 10
weight_decay, beta1, beta2, grad_clip = 0.1, 0.9, 0.95, 1.0
dtype = "fp32"


class GPT(nn.Module):
    """Predicts the next character at each position."""

    def __init__(self, vocabulary: int, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block_size, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple:
        """Return the logits and the loss, for ids and targets shaped (batch, length)."""
        positions = torch.arange(ids.size(1), device=ids.device)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1), device=ids.device)
        hidden = self.blocks(self.tokens(ids) + self.positions(positions), mask, is_causal=True)
        logits = self.head(hidden)
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


parser = argparse.ArgumentParser()
parser.add_argument("--max-iters", type=int, default=200)
parser.add_argument("--init-from", choices=("scratch", "resume"), default="scratch")
max_iters = lr_decay_iters = parser.parse_args().max_iters
init_from = parser.parse_args().init_from

world = init()
torch.manual_seed(1337)

text = inspect.getsource(argparse)
characters = sorted(set(text))
ids = torch.tensor([characters.index(character) for character in text])
data = {"train": ids[: int(0.9 * len(ids))], "val": ids[int(0.9 * len(ids)) :]}
windows = {split: data[split].unfold(0, block_size + 1, 1) for split in data}
windows["val"] = windows["val"][torch.randperm(len(windows["val"]))[: eval_iters * batch_size]]

model = GPT(len(characters))
optimizer = torch.optim.AdamW(
    model.parameters(), lr=learning_rate, betas=(beta1, beta2), weight_decay=weight_decay
)


def get_lr(it):
    """Return the learning rate of an iteration: a linear warmup, then a cosine."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    decay_ratio = (it - warmup_iters) / max(1, lr_decay_iters - warmup_iters)
    coeff = 0.5 * (1.0 + math.cos(math.pi * min(1.0, decay_ratio)))
    return min_lr + coeff * (learning_rate - min_lr)


task = Task(
    model=model,
    optimizer=optimizer,
    scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda it: get_lr(it) / learning_rate
    ),
    data=windows["train"],
    loss=lambda model, window: model(window[:, :-1], window[:, 1:])[1],
    clip_norm=grad_clip,
    validation=windows["val"],
)
t0 = time.time()
with Training(
    task,
    global_batch_size=gradient_accumulation_steps * batch_size,
    epochs=0,
    max_steps=max_iters,
    precision=dtype,
    run_dir=out_dir,
    resume="auto" if init_from == "resume" else "",
) as training:
    for step in training:
        if step.number % eval_interval == 0:
            losses = training.evaluate()
            if world.rank == 0:
                print(f"step {step.number}: val loss {losses['loss']:.4f}")
        dt = time.time() - t0
        t0 = time.time()
        if step.number % log_interval == 0 and world.rank == 0:
            print(f"iter {step.number}: loss {step.loss:.4f}, time {dt * 1000:.2f}ms")
