"""Measures layout experts on a chain of mixtures of experts.

    python benchmarks/experts.py --link-mbit 90 --slow-all 3   (the hidden exchange; as root)
    mpirun -np 2 --bind-to core python benchmarks/experts.py placement --batch 2048 --chunks 1
                                                               (one rank three times slower)
    mpirun -np 1 python benchmarks/experts.py alone            (against a plain module)
    mpirun -np 2 python benchmarks/experts.py together         (against replicate, on one host)

Over the link: two emulated hosts with a rank each. In one job, blocks of steps in which tokens
travel while others are computed alternate with blocks in which all of them arrive before anything
is computed, and all outputs are computed before any is sent. In the latter, what a rank waits is
the exchange's part of a step; choose the link's speed by it. With --slow-all, both ranks sleep in
proportion to the processor time that they use, as if they were slower: what else the machine does
then changes little, and messages need no core that computes, as beside an accelerator.

Medians and quartiles over pairs of blocks; world rank 0 prints.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from shared.comparison import in_turns, quartiles, ratios

if TYPE_CHECKING:
    import torch

    from kaitian_mpi.mpi.world import World

_TIMEOUT_SEC = 900
_CALIBRATING = 10  # steps, after which a plan is as it stays
_PASSED_ON = "width", "layers", "experts", "batch", "pairs", "steps", "settle", "chunks", "slow-all"


def make_model(options: argparse.Namespace, make_mixture: Callable[..., Any]) -> Any:
    """Return a chain of mixtures, each of which is added to its input."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            experts = [
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(options.experts)
            ]
            self.mixture = make_mixture(experts, nn.Linear(width, options.experts), top_k=2)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = tokens + self.mixture(self.norm(tokens))
            return output

    width = options.width
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(options.layers)])


def make_task(options: argparse.Namespace) -> Any:
    """Return the training of the chain to give back its random tokens."""
    import torch
    from torch.nn.functional import mse_loss

    import kaitian_mpi

    generator = torch.Generator().manual_seed(0)

    class Tokens(torch.utils.data.Dataset[torch.Tensor]):
        gives_batches = True
        rows = torch.randn(8 * options.batch, options.width, generator=generator)

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, indices: Any) -> torch.Tensor:
            return self.rows[indices]

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        error = mse_loss(model(batch), batch)
        return error + 0.01 * sum(block.mixture.balance_loss for block in model)

    return kaitian_mpi.Task(
        model=make_model(options, kaitian_mpi.Experts),
        optimizer=_adamw,
        data=Tokens(),
        loss=loss,
    )


def _adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-4)


@contextmanager
def open_training(options: argparse.Namespace, **settings: Any) -> Iterator[Any]:
    """Yield a training whose first steps are done. Collective."""
    import kaitian_mpi

    common = {"parity": False, "check_every": 0, "log_interval": 1e9, "progress": "none"}
    common |= {"global_batch_size": options.batch, "epochs": 0, "max_steps": 1_000_000}
    with kaitian_mpi.Training(partial(make_task, options), **{**common, **settings}) as training:
        yield training


def median_step(steps: Iterator[Any], count: int, settle: int) -> float:
    """Return the median seconds of the next steps but the first ones. Collective."""
    for _ in range(settle):
        next(steps)
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        next(steps)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def block_sec(world: World, options: argparse.Namespace, **settings: Any) -> float:
    """Return the slowest rank's median step of a training of its own. Collective."""
    from kaitian_mpi.mpi.exchange import gather_values

    with open_training(options, quiet=True, **settings) as training:
        steps = iter(training)
        seconds = median_step(steps, options.steps, options.settle)
        steps.close()
    return max(gather_values(world.comm, seconds))


def compare_overlap(options: argparse.Namespace) -> None:
    """Print what hiding the exchange is worth on these hosts. Collective."""
    import kaitian_mpi
    from kaitian_mpi.mpi.exchange import gather_values

    slowed = f"0:{options.slow_all},1:{options.slow_all}" if options.slow_all > 1 else ""
    world = kaitian_mpi.init(devices="cpu", emulate_slowdown=slowed)
    settings = {"layout": "experts", "balance": "off", "quiet": True}
    with open_training(options, expert_chunks=options.chunks, **settings) as training:
        steps = iter(training)
        next(steps)
        dispatcher = training._session.loop.engine.exchange.dispatcher
        waited: list[float] = []

        def step_sec(hides: bool) -> float:
            dispatcher.set_chunks(options.chunks if hides else 0)
            median_step(steps, 1, options.settle)
            before = dispatcher.waited_sec
            seconds = median_step(steps, options.steps, 0)
            part = (dispatcher.waited_sec - before) / options.steps / seconds
            if not hides:
                waited.append(min(gather_values(world.comm, part)))
            return max(gather_values(world.comm, seconds))

        calls = {"hidden": partial(step_sec, True), "apart": partial(step_sec, False)}
        seconds = in_turns(calls, options.pairs)
        steps.close()
    if world.rank == 0:
        print(
            f"overlap: {quartiles(ratios(seconds['apart'], seconds['hidden']), '.2f')} times as "
            f"fast as without, where the exchange takes {quartiles(waited[1:], '.2f')} of a step; "
            f"{_in_ms(seconds)}",
            flush=True,
        )


def compare_placement(options: argparse.Namespace) -> None:
    """Print what planned rows and experts are worth if a rank is slower. Collective."""
    import kaitian_mpi
    from kaitian_mpi.mpi.exchange import gather_values

    world = kaitian_mpi.init(devices="cpu", emulate_slowdown=f"1:{options.slowdown}")
    predicted: list[float] = []

    def planned_sec() -> float:
        given = {"layout": "experts", "expert_chunks": options.chunks, "quiet": True}
        with open_training(options, balance="static", **given) as training:
            steps = iter(training)
            seconds = median_step(steps, options.steps, options.settle + _CALIBRATING)
            steps.close()
            predicted.append(training.summary.experts["predicted_step_sec"] / seconds)
        return max(gather_values(world.comm, seconds))

    equal = {"layout": "experts", "expert_chunks": options.chunks, "balance": "off"}
    equal_sec = partial(block_sec, world, options, **equal)
    seconds = in_turns({"planned": planned_sec, "equal": equal_sec}, options.pairs, warm_up=0)
    if world.rank == 0:
        print(
            f"placement: {quartiles(ratios(seconds['equal'], seconds['planned']), '.2f')} times as "
            f"fast as equal rows and experts; predicted step / measured "
            f"{quartiles(predicted, '.2f')}; {_in_ms(seconds)}",
            flush=True,
        )


def compare_alone(options: argparse.Namespace) -> None:
    """Print how fast `Experts`, and layout experts, are on one rank. Collective."""
    import torch
    from torch import nn

    import kaitian_mpi

    class Plain(nn.Module):
        """A mixture as it is often written: one expert after the other, on its tokens."""

        def __init__(self, experts: list[nn.Module], gate: nn.Module, top_k: int) -> None:
            super().__init__()
            self.experts, self.gate, self.top_k = nn.ModuleList(experts), gate, top_k

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            weights, chosen = self.gate(tokens).softmax(-1).topk(self.top_k, -1)
            weights = weights / weights.sum(-1, keepdim=True)
            output = torch.zeros_like(tokens)
            for number, expert in enumerate(self.experts):
                rows, places = torch.where(chosen == number)
                if len(rows):
                    weighted = expert(tokens[rows]) * weights[rows, places, None]
                    output.index_add_(0, rows, weighted)
            return output

    world = kaitian_mpi.init(devices="cpu")
    tokens = torch.randn(options.batch, options.width)
    models = {
        name: make_model(options, kind)
        for name, kind in (("module", kaitian_mpi.Experts), ("plain", Plain))
    }

    def module_sec(name: str) -> float:
        model, seconds = models[name], []
        optimizer = _adamw(model)
        for _ in range(options.settle + options.steps):
            began = time.perf_counter()
            optimizer.zero_grad()
            (model(tokens) - tokens).square().mean().backward()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[options.settle :])

    seconds = in_turns({name: partial(module_sec, name) for name in models}, options.pairs)
    if world.rank == 0:
        print(
            f"alone: time of Experts / a plain module "
            f"{quartiles(ratios(seconds['module'], seconds['plain']))}; {_in_ms(seconds)}",
            flush=True,
        )
    compare_together(options)


def compare_together(options: argparse.Namespace) -> None:
    """Print how fast layout experts is, relative to replicate, on these ranks. Collective."""
    import kaitian_mpi

    world = kaitian_mpi.init(devices="cpu")
    calls = {
        layout: partial(block_sec, world, options, layout=layout, balance="off")
        for layout in ("experts", "replicate")
    }
    seconds = in_turns(calls, options.pairs, warm_up=0)
    if world.rank == 0:
        print(
            f"{world.size} ranks of a host: time of layout experts / replicate "
            f"{quartiles(ratios(seconds['experts'], seconds['replicate']))}; {_in_ms(seconds)}",
            flush=True,
        )


def _in_ms(seconds: dict[str, list[float]]) -> str:
    parts = (f"{name} {1e3 * statistics.median(values):.1f}" for name, values in seconds.items())
    return f"ms a step: {', '.join(parts)}"


def compare_over_link(options: argparse.Namespace) -> None:
    """Run the comparison of overlap on two hosts of this machine's own making."""
    from shaped_hosts import print_over_link

    command = [os.path.abspath(__file__), "overlap"]
    for name in _PASSED_ON:
        command += [f"--{name}", str(getattr(options, name.replace("-", "_")))]
    print_over_link(command, options.link_mbit, "overlap", _TIMEOUT_SEC)


SECTIONS: dict[str, Callable[[argparse.Namespace], None]] = {
    "overlap": compare_overlap,
    "placement": compare_placement,
    "alone": compare_alone,
    "together": compare_together,
}


def main() -> None:
    """Run the comparisons that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help=", ".join(SECTIONS))
    parser.add_argument("--link-mbit", type=float, default=0.0, help="of each link, each way")
    parser.add_argument("--slowdown", type=float, default=3.0, help="of the second rank")
    parser.add_argument(
        "--slow-all", type=float, default=1.0, help="of both ranks, with --link-mbit"
    )
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8, help="of a layer")
    parser.add_argument("--batch", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--chunks", type=int, default=4, help="of the tokens for another rank")
    parser.add_argument("--pairs", type=int, default=6, help="of blocks")
    parser.add_argument("--steps", type=int, default=8, help="per block")
    parser.add_argument("--settle", type=int, default=2, help="steps before those")
    options = parser.parse_args()
    if options.link_mbit:
        compare_over_link(options)
    for section in options.sections:
        SECTIONS[section](options)


if __name__ == "__main__":
    main()
