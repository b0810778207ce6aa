"""A small GPT that learns a text character by character, on ranks of any speed.

    mpirun -np 2 python examples/gpt.py --text book.txt --steps 500
    mpirun -np 3 python examples/gpt.py --emulate-kinds gpu,gpu,mlu

Without --text it learns the source of Python's argparse module. A tenth of the text is held out for
the perplexity. At the end it writes a sample.
"""

import argparse
import inspect
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

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


class Windows(Dataset):
    """Overlapping pieces of a text: `context` characters, and the one that follows each."""

    def __init__(self, ids: torch.Tensor, context: int, stride: int) -> None:
        self.windows = ids.unfold(0, context + 1, stride)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.windows[index, :-1], self.windows[index, 1:]


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy of the batch's characters."""
    given, following = batch
    return functional.cross_entropy(model(given).flatten(0, 1), following.flatten())


def measure(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, tuple]:
    """Return the sum of the cross-entropy, and over how many characters it is."""
    count = batch[1].numel()
    return {"cross-entropy": (loss_of(model, batch) * count, count)}


def main() -> None:
    """Train, then write a sample on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="a text file to learn from")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="windows of text in a step")
    parser.add_argument("--context", type=int, default=64, help="characters that the model sees")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines")
    parser.add_argument("--run-dir", default="", help="folder for checkpoints and results")
    parser.add_argument("--emulate-kinds", default="", help="such as gpu,gpu,mlu")
    options = parser.parse_args()

    world = kaitian_mpi.init(emulate_kinds=options.emulate_kinds)
    text = options.text.read_text() if options.text else inspect.getsource(argparse)
    vocabulary = sorted(set(text))
    ids = torch.tensor([vocabulary.index(character) for character in text])
    context, held_out = options.context, max(len(ids) // 10, options.context + 1)

    torch.manual_seed(0)
    task = kaitian_mpi.Task(
        model=GPT(len(vocabulary), context, options.width, options.heads, options.layers),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=options.lr),
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR,  # takes the optimizer and the steps
        clip_norm=1.0,
        data=Windows(ids[:-held_out], context, stride=1),
        loss=loss_of,
        validation=Windows(ids[-held_out:], context, stride=context),
        metrics=measure,
    )
    settings = {"global_batch_size": options.batch_size, "run_dir": options.run_dir}
    with kaitian_mpi.Training(task, max_steps=options.steps, epochs=1000, **settings) as training:
        for step in training:
            if world.rank == 0 and (step.number == 1 or step.number % options.log_every == 0):
                print(f"step {step.number} loss {step.loss:.4f} samples {step.batch_sizes}")
        perplexity = math.exp(training.evaluate()["cross-entropy"])

    if world.rank == 0:
        start = ids[:1].view(1, 1).to(world.device)
        written = training.model.eval().write(start, length=200)[0].tolist()
        print(f"held-out perplexity {perplexity:.2f}")
        print("sample:", "".join(vocabulary[index] for index in written))


if __name__ == "__main__":
    main()
