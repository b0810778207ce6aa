"""Random trainings in every layout, compared with one process in float64.

A case follows from its seed alone: a model of layers that share modules and weights, pass tuples
and change in place what they get; outputs that nothing uses, or only for some samples; parameters
that are frozen for some steps, or that no optimizer has; several optimizers, clipping,
micro-batches, weights of zero, shares that change from step to step, stages cut anywhere,
sharded parameters; and a resume in another layout in the middle.

    mpirun -np 3 --with-ft ulfm python tests/mpi/layout_cases.py 17        # one seed
    mpirun -np 3 --with-ft ulfm python tests/mpi/layout_cases.py 0:200     # seeds 0 to 199
    mpirun -np 3 ... layout_cases.py 17 --layouts parts,pipeline           # instead of the seed's
    mpirun -np 3 ... layout_cases.py 17 --show                             # the case in words

It prints a line a case: right, refused with an error of one line, or what differs. Without ULFM,
parts have no mirrors. A case that hangs or ends the job is the one of the last line that begins.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from given_layouts import LAYOUTS, given_layout, settings_of
from layers import (
    Adds,
    Chooses,
    Gated,
    Joins,
    Offers,
    Residual,
    Sometimes,
    Splits,
    Takes,
    Tied,
    make_mixture,
)
from torch import nn
from torch.utils.data import TensorDataset

import kaitian_mpi
from kaitian_mpi import Experts, Task, Training
from kaitian_mpi.balance.ownership import NO_MIRROR
from kaitian_mpi.balance.pipeline import PipelinePlan, Stage
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.runtime.ulfm import is_revoked
from kaitian_mpi.train.data.sampler import LoadAdaptiveSampler

TOLERANCE = 1e-9
_FEATURES, _VOCABULARY, _CLASSES = 5, 11, 3


class Pools(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(x).mean(1)


class WholeMatrix(torch.optim.Optimizer):
    """Normalizes each parameter's gradient: an optimizer that needs whole parameters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    norm = parameter.grad.norm() + 1e-2
                    parameter.add_(parameter.grad / norm, alpha=-group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, weight_decay=0.01),
    "plain": lambda p: torch.optim.SGD(p, lr=0.3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-2),
    "whole": lambda p: WholeMatrix(p, lr=0.05),
}


@dataclass(frozen=True)
class Case:
    """A training, made of a seed; each field is a choice."""

    seed: int
    blocks: list[str]
    width: int
    is_text: bool
    optimizers: list[str]
    left_out: float
    """The fraction of parameters that no optimizer has."""
    clip: float | None
    has_scheduler: bool
    loss: str
    shuffle: bool
    samples: int
    batch: int
    epochs: int
    micro_batch: int
    form: str
    frozen: float
    changes: dict[int, str]
    """What the script does after a step: freezes, unfreezes, evaluates."""
    layouts: list[str] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    """After which step each layout but the last stops."""
    balance: float = 0.0
    """The factor of the mixtures' balancing losses in the loss."""
    tolerance: float = TOLERANCE


def make_case(seed: int) -> Case:
    """Return the case of a seed; the same on every rank."""
    rng = random.Random(seed)
    kinds = ["linear", "linear", "act", "act", "norm", "residual", "split", "adds", "gated", "tied"]
    kinds += ["same", "nested", "unused", "sometimes"]
    samples, batch, epochs = rng.randint(18, 40), rng.randint(5, 16), rng.choice([1, 1, 2])
    steps = epochs * -(-samples // batch)
    form = rng.choice(["closed"] * 5 + ["batches", "micro_batches", "epochs"])
    layouts = rng.choices(LAYOUTS, k=rng.choice([1, 2, 2, 3]))
    layouts[0] = LAYOUTS[seed % len(LAYOUTS)]
    stops = sorted(rng.sample(range(1, steps), min(len(layouts) - 1, steps - 1)))
    changes = {rng.randint(1, steps): rng.choice(["unfreeze", "freeze", "evaluate"]) for _ in "12"}
    return Case(
        seed=seed,
        blocks=rng.choices(kinds, k=rng.randint(2, 7)),
        width=rng.choice([4, 6, 9]),
        is_text=rng.random() < 0.25,
        optimizers=rng.choices([*OPTIMIZERS], k=rng.choice([1, 1, 1, 2, 3])),
        left_out=rng.choice([0, 0, 0.2]),
        clip=rng.choice([None, 0.05, 0.5]),
        has_scheduler=rng.random() < 0.3,
        loss=rng.choice(["mean", "mean", "counted", "counted nan", "counted finite"]),
        shuffle=rng.random() < 0.5,
        samples=samples,
        batch=batch,
        epochs=epochs,
        micro_batch=rng.choice([0, 0, 1, 2, 3, 5]),
        form=form,
        frozen=rng.choice([0, 0, 0.3]),
        changes=changes,
        layouts=layouts[: len(stops) + 1],
        stops=stops,
    )


def make_model(case: Case) -> nn.Sequential:
    """Return a case's model, in float64."""
    torch.manual_seed(case.seed)
    width, shared_act = case.width, nn.Tanh()
    gates: dict[int, nn.Linear] = {}
    shared = nn.Linear(width, width)
    first: nn.Module = Pools(width) if case.is_text else nn.Linear(_FEATURES, width)
    layers = [first]
    for number, kind in enumerate(case.blocks):
        if kind == "sometimes" and "parts" in case.layouts:
            kind = "unused"  # the order of use would depend on a rank's samples: it alone refuses
        if kind == "linear":
            layers.append(nn.Linear(width, width, bias=number % 2 == 0))
        elif kind == "act":
            layers.append(shared_act)
        elif kind == "norm":
            layers.append(nn.LayerNorm(width))
        elif kind == "residual":
            layers.append(Residual(width))
        elif kind == "split":
            layers += [Splits(width, "dict" if number % 2 else "tuple"), Joins()]
        elif kind == "unused":
            layers += [Offers(width), Takes()]
        elif kind == "sometimes":
            layers += [Sometimes(width), Chooses()]
        elif kind == "adds":
            layers += [nn.Linear(width, width), Adds(width)]
        elif kind == "gated":
            layers.append(Gated(width))
        elif kind == "tied":
            layers += [shared, Tied(shared)]
        elif kind == "same":
            layers += [shared, shared_act]
        elif kind == "mixture":
            layers.append(make_mixture(random.Random(f"{case.seed} {number}"), width, gates))
        else:
            layers.append(nn.Sequential(nn.Linear(width, width), shared_act))
    model = nn.Sequential(*layers, nn.Linear(width, _CLASSES)).double()
    freeze(case, model, 0)
    return model


def freeze(case: Case, model: nn.Module, step: int) -> None:
    """Freeze or unfreeze what the case wants after a step."""
    rng, change = random.Random(f"{case.seed} {step}"), case.changes.get(step, "")
    parameters = list(model.parameters())
    chosen = [rng.random() < (case.frozen if not step else 0.4) for _ in parameters[:-1]]
    for parameter, is_chosen in zip(parameters, chosen, strict=False):  # the last one is trained
        if (step == 0 or change == "freeze") and is_chosen:
            parameter.requires_grad_(False)
        elif change == "unfreeze":
            parameter.requires_grad_(True)


def make_optimizers(case: Case, model: nn.Module) -> list[torch.optim.Optimizer]:
    rng = random.Random(case.seed)
    parts: list[list[nn.Parameter]] = [[] for _ in case.optimizers]
    parameters = list(model.parameters())
    for parameter in parameters[:-1]:
        if rng.random() >= case.left_out:
            rng.choice(parts).append(parameter)
    parts[0].append(parameters[-1])
    made = []
    for name, part in zip(case.optimizers, parts, strict=True):
        half = len(part) // 2
        groups = [{"params": part[:half]}, {"params": part[half:]}] if half else [{"params": part}]
        made += [OPTIMIZERS[name](groups)] if part else []
    return made


def make_data(case: Case) -> TensorDataset:
    """Return samples of which at least one of each step counts."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = case.samples, _FEATURES
    x = torch.randn(shape, generator=generator).double()
    if case.is_text:
        x = torch.randint(_VOCABULARY, shape, generator=generator)
    y = torch.randn(case.samples, _CLASSES, generator=generator).double()
    counts = (torch.rand(case.samples, generator=generator) < 0.4).double()
    for indices in order_of(case):
        if not counts[indices].any():
            counts[indices[0]] = 1
    return TensorDataset(x, y, counts)


def order_of(case: Case) -> list[list[int]]:
    """Return the samples of each step."""
    options: dict[str, Any] = {"shuffle": case.shuffle, "seed": 0, "min_batch": 1}
    sampler = LoadAdaptiveSampler(range(case.samples), [case.batch], 0, **options)
    steps = []
    for epoch in range(case.epochs):
        sampler.set_epoch(epoch)
        for begin in range(0, case.samples, case.batch):
            steps.append(sampler.indices(begin, min(case.batch, case.samples - begin)))
    return [list(map(int, indices)) for indices in steps]


def compute_loss(case: Case, model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets, counts = batch
    losses = (model(inputs) - targets).square().mean(-1)
    if case.loss == "mean":
        loss = losses.mean()
        if case.balance:
            mixtures = [module for module in model.modules() if isinstance(module, Experts)]
            loss += case.balance * sum(mixture.balance_loss for mixture in mixtures)
        return loss
    if case.loss == "counted finite" and not counts.any():
        return losses.mean()  # as of a regularizer; nothing of it counts
    least = 1e-9 if case.loss == "counted" else 0.0
    return (losses * counts).sum() / counts.sum().clamp(min=least)


def make_task(case: Case) -> Task:
    scheduler = lambda made: [  # noqa: E731
        torch.optim.lr_scheduler.ExponentialLR(each, 0.9)
        for each in (made if isinstance(made, list) else [made])
    ]
    loss, validation = partial(compute_loss, case), make_data(replace(case, seed=case.seed + 1))
    return Task(
        model=make_model(case),
        optimizer=partial(make_optimizers, case),
        data=make_data(case),
        shuffle=case.shuffle,
        loss=loss if case.form in ("closed", "epochs") else None,
        weight=None if case.loss == "mean" else lambda batch: batch[2].sum(),
        scheduler=scheduler if case.has_scheduler else None,
        clip_norm=case.clip,
        validation=validation,
        metrics=metrics,
    )


def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"error": (model(batch[0]) - batch[1]).abs().sum(), "first": (model_sign(batch[1]), 7.0)}


def model_sign(targets: torch.Tensor) -> float:
    return float((targets > 0).sum())


@dataclass
class Result:
    losses: list[float] = field(default_factory=list)
    evaluated: dict[int, float] = field(default_factory=dict)
    """The error by the step after which it was evaluated; the last one's is the end's."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    refusal: str = ""
    trace: str = ""


def train_alone(case: Case) -> Result:
    """Return what one process makes of a case."""
    model, data, result = make_model(case), make_data(case), Result()
    optimizers = make_optimizers(case, model)
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers
    ]
    validation = make_data(replace(case, seed=case.seed + 1))[:]
    for number, indices in enumerate(order_of(case), 1):
        model.zero_grad()
        loss = compute_loss(case, model, data[indices])
        loss.backward()
        result.losses.append(loss.item())
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        for one in (*optimizers, *(schedulers if case.has_scheduler else ())):
            one.step()
        freeze(case, model, number)
        with torch.no_grad():
            result.evaluated[number] = float(metrics(model, validation)["error"]) / case.samples
    result.weights = model.state_dict()
    return result


def steps_of(training: Training, case: Case) -> Iterator[int]:
    """Train in the case's form; yield the number of each step that is done."""
    if case.form == "closed":
        for step in training:
            yield step.number
    elif case.form == "epochs":
        for epoch in training.epochs():
            for step in epoch:
                yield step.number
    elif case.form == "batches":
        for batch in training.batches():
            training.backward(compute_loss(case, training.model, batch))
            training.step()
            yield training.steps_done
    else:
        for batches in training.micro_batches():
            for batch in batches:
                training.backward(compute_loss(case, training.model, batch))
            training.step()
            yield training.steps_done


def train(case: Case, world: Any, folder: Path) -> Result:
    """Return what the ranks make of a case, in its layouts one after the other. Collective."""
    result = Result()
    last = len(order_of(case))
    for layout, stop in zip(case.layouts, [*case.stops, last], strict=True):
        rng = random.Random(f"{case.seed} {layout} {stop}")
        number = random.Random(f"{case.seed} {stop}").choice([1, 2, 3])
        chunks = {"expert_chunks": number} if layout == "experts" else {}
        with (
            in_layout(layout, case, world.size, rng),
            Training(
                partial(make_task, case),
                **settings_of(layout),
                **chunks,
                global_batch_size=case.batch,
                micro_batch_size=case.micro_batch,
                epochs=case.epochs,
                run_dir=str(folder),
                resume="auto",
                balance="off",
                benchmark_seconds=0.05,
                parity=False,
                check_every=0,
                log_interval=0,
                quiet=True,
            ) as training,
        ):
            for number in steps_of(training, case):
                step = training.last_step
                result.losses.append(step.loss)
                assert number == step.number == len(result.losses), "a step is left out"
                freeze(case, training.model, number)
                if case.changes.get(number) == "evaluate":
                    result.evaluated[number] = training.evaluate()["error"]
                if layout != "pipeline" and rng.random() < 0.6:
                    training._session.loop.sampler.set_plan(shares(rng, case.batch, world.size))
                if number == stop and stop != last:
                    break
    result.evaluated[last] = training.summary.validation["error"]
    if world.rank == 0:
        result.weights = torch.load(folder / "checkpoints/model.pt")
    return result


def shares(rng: random.Random, batch: int, size: int) -> list[int]:
    """Return shares of a batch, some of which may be empty."""
    cuts = sorted(rng.choices(range(batch + 1), k=size - 1))
    return [end - begin for begin, end in zip([0, *cuts], [*cuts, batch], strict=True)]


def in_layout(
    layout: str, case: Case, size: int, rng: random.Random
) -> AbstractContextManager[None]:
    """Plan at random what measurements plan otherwise: shares, stages, owners."""

    def memory() -> list[float]:
        free = [rng.choice([0.0, 1.0, 2.0, 5.0]) for _ in range(size)]
        free[rng.randrange(size)] = 3.0
        return free

    def sharded(numbers: frozenset[int]) -> frozenset[int]:
        return frozenset(n for n in sorted(numbers) if rng.random() < 0.8) or numbers

    def experts(count: int) -> tuple[list[int], list[int]]:
        owners = [rng.randrange(size) for _ in range(count)]
        others = [[NO_MIRROR, *(rank for rank in range(size) if rank != owner)] for owner in owners]
        return owners, [rng.choice(ranks) for ranks in others]

    return given_layout(
        layout,
        experts=experts,
        shares=lambda: shares(rng, case.batch, size),
        stages=lambda layers: random_stages(rng, layers, size, case.batch),
        memory=memory,
        sharded=sharded,
    )


def random_stages(rng: random.Random, layers: int, size: int, batch: int) -> PipelinePlan:
    """Return stages cut anywhere, of one or more ranks each; some ranks may have none."""
    count = rng.randint(1, min(size, layers))
    ends = [*sorted(rng.sample(range(1, layers), count - 1)), layers]
    ranks = rng.sample(range(size), rng.randint(count, size))
    places = [*range(count), *(rng.randrange(count) for _ in ranks[count:])]
    of_stage = [
        sorted(r for r, p in zip(ranks, places, strict=True) if p == s) for s in range(count)
    ]
    stages = tuple(
        Stage(begin, end, tuple(ranks), tuple(rng.choice([1.0, 2.0, 3.5]) for _ in ranks))
        for begin, end, ranks in zip([0, *ends], ends, of_stage, strict=False)
    )
    return PipelinePlan(stages, rng.randint(1, batch), rng.choice([0, 0, 1, 3]), 0.0, (0,) * size)


def run_case(case: Case, world: Any, folder: Path, shows: bool = False) -> str:
    """Return how a case ends: right, refused, or what differs. Collective.

    If it `shows` more, it prints where a refusal comes from.
    """
    try:
        with redirect_stdout(StringIO()):
            result = train(case, world, folder)
    except UserError as error:
        if is_revoked(world.comm):  # no other case can follow
            raise
        result = Result(refusal=str(error), trace=traceback.format_exc())
    refusals = gather_values(world.comm, result.refusal)
    if any(refusals):
        if shows and world.rank == 0:
            print(result.trace, flush=True)
        kinds = sorted(set(refusals))
        return f"refused: {kinds[0]}" if len(kinds) == 1 else f"WRONG: refused by some: {kinds}"
    losses = gather_values(world.comm, result.losses)
    are_equal = all(rank_losses == losses[0] for rank_losses in losses)
    fault = "" if are_equal else "losses of the ranks differ"
    if world.rank == 0:
        fault = fault or differences(result, train_alone(case), case.tolerance)
    fault = gather_values(world.comm, fault)[0]
    return f"WRONG: {fault}" if fault else "right"


def differences(result: Result, expected: Result, tolerance: float) -> str:
    """Return what differs, of the first kind that does."""
    pairs = [*zip(result.losses, expected.losses, strict=True)]
    pairs += [
        (evaluation, expected.evaluated[step]) for step, evaluation in result.evaluated.items()
    ]
    for name, value in expected.weights.items():
        pairs.append((result.weights[name], value))
    names = [f"loss {n}" for n in range(1, len(result.losses) + 1)]
    names += [f"evaluation {step}" for step in result.evaluated] + [*expected.weights]
    for name, (result_value, value) in zip(names, pairs, strict=True):
        one, other = torch.as_tensor(result_value).double(), torch.as_tensor(value).double()
        if not torch.allclose(one, other, rtol=tolerance, atol=tolerance):
            return f"{name} differs by {float((one - other).abs().max()):.1e}"
    return ""


def main(make: Callable[[int], Case], description: str) -> None:
    """Run the cases of some seeds, and exit with 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("seeds", help="one, or the first and the end: 0:200")
    parser.add_argument("--layouts", default="", help="instead of the seeds' own")
    parser.add_argument("--show", action="store_true", help="print each case")
    options = parser.parse_args()
    begin, _, end = options.seeds.partition(":")
    world = kaitian_mpi.init()
    wrong = 0
    for seed in range(int(begin), int(end or int(begin) + 1)):
        case = make(seed)
        if options.layouts:
            layouts = options.layouts.split(",")
            case = replace(case, layouts=layouts, stops=list(range(1, len(layouts))))
            if {*layouts} != {"experts"}:  # in others it is of each rank's tokens
                case = replace(case, balance=0.0)
        if world.rank == 0:
            print(f"seed {seed} {','.join(case.layouts)}: ", end="", flush=True)
            if options.show:
                print(case)
        verdict = run_in_folder(case, world, options.show)
        wrong += verdict.startswith("WRONG")
        if world.rank == 0:
            print(verdict, flush=True)
    sys.exit(min(wrong, 1))


def run_in_folder(case: Case, world: Any, shows: bool = False) -> str:
    """Run a case in a folder of its own that all ranks share. Collective."""
    with tempfile.TemporaryDirectory() as rank_folder:
        folder = Path(gather_values(world.comm, rank_folder)[0])
        verdict = run_case(case, world, folder / "run", shows)
        world.comm.Barrier()
    return verdict


if __name__ == "__main__":
    main(make_case, __doc__)
