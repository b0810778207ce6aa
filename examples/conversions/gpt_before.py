"""A character-level GPT in the shape of nanoGPT's train.py: iterations, random windows, DDP.

torchrun --nproc-per-node 2 examples/conversions/gpt_before.py
"""

import argparse
import inspect
import math
import os
import time
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

out_dir = "out"
eval_interval, eval_iters, log_interval = 50, 10, 10
gradient_accumulation_steps, batch_size, block_size = 4, 8, 32
learning_rate, min_lr, warmup_iters = 3e-3, 3e-4, 10
weight_decay, beta1, beta2, grad_clip = 0.1, 0.9, 0.95, 1.0
backend = "gloo"
dtype = "float32"


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

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend=backend)
    ddp_rank = int(os.environ["RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    master_process = True
    seed_offset = 0
    ddp_world_size = 1
device = "cpu"
if master_process:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + seed_offset)
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
ctx = nullcontext() if dtype == "float32" else torch.amp.autocast(device_type=device, dtype=ptdtype)

text = inspect.getsource(argparse)
characters = sorted(set(text))
ids = torch.tensor([characters.index(character) for character in text])
data = {"train": ids[: int(0.9 * len(ids))], "val": ids[int(0.9 * len(ids)) :]}


def get_batch(split):
    """Return random windows of a text, and those one character further on."""
    ix = torch.randint(len(data[split]) - block_size, (batch_size,))
    x = torch.stack([data[split][i : i + block_size] for i in ix])
    y = torch.stack([data[split][i + 1 : i + 1 + block_size] for i in ix])
    return x.to(device), y.to(device)


iter_num = 0
best_val_loss = 1e9
model = GPT(len(characters)).to(device)
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location=device)
    model.load_state_dict(checkpoint["model"])
    iter_num = checkpoint["iter_num"]
    best_val_loss = checkpoint["best_val_loss"]
scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")
optimizer = torch.optim.AdamW(
    model.parameters(), lr=learning_rate, betas=(beta1, beta2), weight_decay=weight_decay
)
if init_from == "resume":
    optimizer.load_state_dict(checkpoint["optimizer"])
    checkpoint = None
if ddp:
    model = DDP(model)


@torch.no_grad()
def estimate_loss():
    """Return the mean loss over some batches of each split."""
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            x, y = get_batch(split)
            with ctx:
                _, loss = model(x, y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    """Return the learning rate of an iteration: a linear warmup, then a cosine."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    decay_ratio = (it - warmup_iters) / max(1, lr_decay_iters - warmup_iters)
    coeff = 0.5 * (1.0 + math.cos(math.pi * min(1.0, decay_ratio)))
    return min_lr + coeff * (learning_rate - min_lr)


x, y = get_batch("train")
t0 = time.time()
raw_model = model.module if ddp else model
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            if iter_num > 0:
                checkpoint = {
                    "model": raw_model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "iter_num": iter_num,
                    "best_val_loss": best_val_loss,
                }
                torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(x, y)
            loss = loss / gradient_accumulation_steps
        x, y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    dt = time.time() - t0
    t0 = time.time()
    if iter_num % log_interval == 0 and master_process:
        lossf = loss.item() * gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.4f}, time {dt * 1000:.2f}ms")
    iter_num += 1
    if iter_num > max_iters:
        break

if ddp:
    destroy_process_group()
