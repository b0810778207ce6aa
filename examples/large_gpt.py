"""A GPT whose training fits no device alone, on the memory of several.

    kaitian-run -n 3 examples/large_gpt.py --memory 600MB,300MB,300MB
    kaitian-run -n 3 examples/large_gpt.py --memory 600MB,300MB,300MB --layout pipeline --lora

Its state is 16 bytes a parameter, 950 MB here: parameters, gradients, and two numbers of AdamW for
each. `--memory` limits what each rank may allocate, as on small devices. With --lora, the base is
frozen, and only two narrow matrices beside each of its own are trained. At the end, rank 0 draws
each rank's memory, if matplotlib is installed.
"""

import argparse
import inspect
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import kaitian_mpi


class Inputs(nn.Module):
    """Embeds tokens and their positions."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, width) for ids (batch, length)."""
        return self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))


class Block(nn.Module):
    """Causal self-attention, then an MLP, both residual."""

    def __init__(self, width: int, heads: int, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.projection = linear(width, 3 * width), linear(width, width)
        self.widen, self.narrow = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for x, shaped (batch, length, width)."""
        heads = self.query_key_value(self.norm_attention(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.widen(self.norm_perceptron(x))))


class LoRA(nn.Linear):
    """A frozen linear layer plus a trained product of two narrow matrices (Hu et al., 2021)."""

    def __init__(self, wide_in: int, wide_out: int, rank: int = 8) -> None:
        super().__init__(wide_in, wide_out)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(wide_in, rank, False), nn.Linear(rank, wide_out, False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for x, shaped (..., wide_in)."""
        return super().forward(x) + self.up(self.down(x))


def make_model(width: int, blocks: int, vocabulary: int, context: int, lora: bool) -> nn.Module:
    """Return a GPT as a chain of layers: by these it can be divided."""
    inputs = Inputs(vocabulary, context, width)
    linear = LoRA if lora else nn.Linear
    chain = [Block(width, width // 64, linear) for _ in range(blocks)]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))
    for module in (inputs, head) if lora else ():
        module.requires_grad_(False)
    return nn.Sequential(inputs, *chain, head)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the mean cross-entropy of the batch's tokens."""
    (ids,) = batch
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def draw(folder: Path) -> None:
    """Draw each rank's memory: what it may use, what the plan says, and the most that it used."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    summary = json.loads((folder / "summary.json").read_text())
    memory = summary.get("memory")
    if not memory:
        print("not drawn: in layout replicate, no memory is planned")
        return
    ranks = range(len(memory))
    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    for name, shift, color in (("limit", 0, "0.88"), ("planned", -0.2, "C0"), ("peak", 0.2, "C1")):
        sizes = [(rank[f"{name}_bytes"] or 0) / 1e6 for rank in memory]
        width = 0.8 if name == "limit" else 0.35
        axes.bar([rank + shift for rank in ranks], sizes, width, label=name, color=color)
    emulated = " (emulated)" if summary["emulated"] else ""
    axes.set(xlabel=f"rank{emulated}", ylabel="MB", xticks=list(ranks))
    axes.legend(frameon=False)
    figure.savefig(folder / "memory.png", dpi=120)
    print(f"each rank's memory: {folder / 'memory.png'}")


def main() -> None:
    """Train some steps, and draw the ranks' memory."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layout", choices=("shard", "pipeline", "auto"), default="shard")
    parser.add_argument("--memory", default="", help="of each rank, such as 600MB,300MB,300MB")
    parser.add_argument("--lora", action="store_true", help="freeze the base")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/large_gpt"))
    options = parser.parse_args()

    world = kaitian_mpi.init()
    text = inspect.getsource(argparse).encode()
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def build() -> kaitian_mpi.Task:  # where memory is limited, the model has to be made within
        torch.manual_seed(0)
        sizes = options.width, options.blocks, 128, options.context
        return kaitian_mpi.Task(
            model=make_model(*sizes, options.lora),
            optimizer=lambda m: torch.optim.AdamW(
                (p for p in m.parameters() if p.requires_grad), lr=1e-4
            ),
            clip_norm=1.0,
            data=TensorDataset(ids.unfold(0, options.context + 1, options.context)),
            loss=loss_of,
        )

    limits = ",".join(f"{rank}:{size}" for rank, size in enumerate(options.memory.split(",")))
    with kaitian_mpi.Training(
        build,
        layout=options.layout,
        emulate_memory=limits if options.memory else "",
        global_batch_size=options.batch_size,
        max_steps=options.steps,
        epochs=1000,
        run_dir=str(options.run_dir),
    ) as training:
        for step in training:
            if world.rank == 0:
                print(f"step {step.number} loss {step.loss:.3f} samples {step.batch_sizes}")
    if world.rank == 0:
        try:
            draw(options.run_dir)
        except ImportError:
            print("not drawn: pip install matplotlib")


if __name__ == "__main__":
    main()
