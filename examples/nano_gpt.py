"""A small GPT that learns a text character by character, trained by stock DDP on mixed devices.

    mpirun -np 2 python examples/nano_gpt.py --text book.txt --steps 500
    mpirun -np 3 python examples/nano_gpt.py --emulate-kinds gpu,gpu,mlu

Without --text it learns the source of Python's argparse module. At the end it generates a sample.
"""

import argparse
import inspect
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import kaitian_mpi


class Block(nn.Module):
    """Causal self-attention, then an MLP, both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for x, shaped (batch, length, width)."""
        heads = self.query_key_value(self.norm_attention(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.norm_perceptron(x))


class GPT(nn.Module):
    """Predicts the next character at each position."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits, shaped (batch, length, vocabulary), of ids (batch, length)."""
        positions = self.positions(torch.arange(ids.size(1), device=ids.device))
        return self.head(self.blocks(self.characters(ids) + positions))

    @torch.no_grad()
    def write(self, ids: torch.Tensor, length: int) -> torch.Tensor:
        """Return ids, shaped (1, n), followed by `length` sampled characters."""
        for _ in range(length):
            scores = self(ids[:, -self.context :])[:, -1]
            ids = torch.cat([ids, torch.multinomial(scores.softmax(-1), 1)], dim=1)
        return ids


def main() -> None:
    """Train, then generate a sample on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="a text file to learn from")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="windows of text per rank")
    parser.add_argument("--context", type=int, default=64, help="characters that the model sees")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines")
    parser.add_argument("--emulate-kinds", default="", help="such as gpu,gpu,mlu")
    options = parser.parse_args()

    world = kaitian_mpi.init(emulate_kinds=options.emulate_kinds)
    text = options.text.read_text() if options.text else inspect.getsource(argparse)
    vocabulary = sorted(set(text))
    ids = torch.tensor([vocabulary.index(character) for character in text])

    torch.manual_seed(0)
    gpt = GPT(len(vocabulary), options.context, options.width, options.heads, options.layers)
    model = kaitian_mpi.data_parallel(gpt.to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    draws = torch.Generator().manual_seed(world.rank)  # different windows on every rank
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(ids) - options.context, (options.batch_size, 1), generator=draws)
        windows = ids[starts + torch.arange(options.context + 1)].to(world.device)
        scores = model(windows[:, :-1])
        loss = functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if world.rank == 0 and (step == 1 or step % options.log_every == 0):
            print(f"step {step} loss {loss.item():.4f}", flush=True)

    if world.rank == 0:
        written = gpt.eval().write(windows[:1, :1], length=200)[0].tolist()
        print("sample:", "".join(vocabulary[index] for index in written))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
