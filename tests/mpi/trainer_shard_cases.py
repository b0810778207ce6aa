"""Random loops over DDP with layout shard, each compared with one process in float64.

A case follows from its seed alone: a model with tied, unused, frozen, 0-dimensional and empty
parameters, some of them used by some ranks only; several optimizers and groups; micro-batches with
and without no_sync, several forwards a backward, every way to clear and to clip; and what scripts
do between steps: one rank saves, evaluates or copies alone, averages, clamps, loads, freezes. Each
rank sleeps at random. From some seed on, layers may be in lower precision, DDP has options, ranks
but 0 may begin on meta, and models are copied and pickled, in their DDP as well.

    mpirun -np 3 python tests/mpi/trainer_shard_cases.py FIRST_SEED CASES
"""

import collections
import contextlib
import copy
import pickle
import random
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from kaitian_mpi.balance import ownership
from kaitian_mpi.balance.ownership import without_mirrors
from kaitian_mpi.distributed.sharded_model import can_be_sharded
from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard import host_parameters, trainer_shards
from kaitian_mpi.integrations.shard.budget import Owners

FEATURES, CLASSES, ROWS = 5, 3, 4
TOLERANCES = {
    torch.float64: 1e-11,
    torch.float32: 2e-3,
    torch.bfloat16: 0.1,
    torch.float16: 0.1,
}


@dataclass
class Case:
    """A loop; every rank draws the same from a seed."""

    seed: int
    width: int
    blocks: list[str]
    """Of the model, in their order."""
    optimizers: list[str]
    created: str
    """When optimizers are created: "early", or "late", after a first backward."""
    steps: list[dict]
    """What each step does."""
    shares: list[float]
    sharded: float
    """The fraction of parameters that are sharded."""
    prefetches: bool
    scaler: bool
    sleeps: bool
    dtypes: list[torch.dtype]
    """Of each block's parameters."""
    options: dict
    """Of DDP."""
    on_meta: list[bool]
    """By rank: whether its model begins on meta."""

    @property
    def tolerance(self):
        """How far a number may be from that of one process."""
        return max(TOLERANCES[dtype] for dtype in [torch.float64, *self.dtypes])


BLOCKS = ("linear", "norm", "scalar", "empty", "tied", "unused", "frozen", "some", "ckpt", "twice")
CLEARS = ("optimizer", "module", "zeros", "by_hand", "zero_by_hand")
CLIPS = ("", "", "norm", "inf", "value", "total", "by_groups", "multiply")
EVENTS = (
    *("save", "save", "save_all", "evaluate", "evaluate_all", "copy", "average", "clamp", "data"),
    *("load", "freeze", "group", "norm", "later", "sleep", "barrier", "eval_mode", "no_step"),
    *("look", "rewrap", "vector"),
)


MORE_EVENTS = (*EVENTS, "alias", "views", "copy_optimizer", "reset", "second", "thrown_away")
NEW_EVENTS = "pickle", "pickle_ddp", "copy_ddp"
# So that the cases of lower seeds stay what they were.
FIRST_WITH_MORE = 5000
FIRST_WITH_OPTIONS = 8000


def draw(seed, size):
    numbers = random.Random(seed)
    pick = numbers.choice
    micro = pick([1, 1, 2, 3])
    place = pick(["before", "between", "after"])
    events = EVENTS if seed < FIRST_WITH_MORE else MORE_EVENTS
    events = events if seed < FIRST_WITH_OPTIONS else (*events, *NEW_EVENTS)

    def step(index):
        return {
            "clear": pick(CLEARS),
            "place": place if numbers.random() < 0.8 else "before",
            "micro": micro if numbers.random() < 0.8 else numbers.randint(1, 3),
            "no_sync": numbers.random() < 0.5,
            "forwards": pick([1, 1, 1, 2]),
            "backwards": pick(["one", "each"]),
            "clip": pick(CLIPS),
            "some": [numbers.random() < 0.5 for _ in range(size * 16)],
            "closure": numbers.random() < 0.1,
            "stepped": [numbers.random() < 0.9 for _ in range(3)],
            "events": [pick(events) for _ in range(pick([0, 0, 1, 1, 2]))],
            "rank": numbers.randrange(size),
        }

    def options():
        """Draw what came later, by numbers of its own."""
        drawn = random.Random(f"options {seed}")
        if seed < FIRST_WITH_OPTIONS:
            return [torch.float64] * 16, {"find_unused_parameters": True}, [False] * size
        lower = drawn.choice([torch.float64, torch.float32, torch.bfloat16, torch.float16])
        dtypes = [drawn.choice([torch.float64, lower]) for _ in range(16)]
        names = "find_unused_parameters", "static_graph", "gradient_as_bucket_view"
        begins = drawn.random() < 0.5
        on_meta = [rank > 0 and begins and drawn.random() < 0.7 for rank in range(size)]
        return dtypes, {name: drawn.random() < 0.5 for name in names}, on_meta

    dtypes, ddp_options, on_meta = options()
    optimizers = [
        pick(["adamw", "adamw", "sgd", "plain", "adagrad", "rmsprop", "fused", "whole"])
        for _ in range(pick([1, 1, 2]))
    ]
    shares = [pick([0.0, 1.0, 1.0, 2.0, 3.5]) for _ in range(size)]
    if not any(shares):
        shares[numbers.randrange(size)] = 1.0
    return Case(
        seed=seed,
        width=numbers.randint(1, 9),
        blocks=[pick(BLOCKS) for _ in range(numbers.randint(1, 6))],
        optimizers=optimizers,
        created="early" if "whole" in optimizers else pick(["early", "early", "late"]),
        steps=[step(index) for index in range(numbers.randint(2, 5))],
        shares=shares,
        sharded=pick([0.0, 1.0, 1.0, 0.5]),
        prefetches=pick([True, False]),
        scaler=numbers.random() < 0.2,
        sleeps=numbers.random() < 0.3,
        dtypes=dtypes,
        options=ddp_options,
        on_meta=on_meta,
    )


class WholeMatrix(torch.optim.Optimizer):
    """Normalizes each parameter's gradient: an optimizer that needs whole parameters."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    norm = parameter.grad.norm() + 1e-2
                    parameter.add_(parameter.grad / norm, alpha=-group["lr"])


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, weight_decay=0.01),
    "plain": lambda p: torch.optim.SGD(p, lr=0.3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-2),
    "whole": lambda p: WholeMatrix(p, lr=0.05),
}


class Model(nn.Module):
    def __init__(self, case):
        super().__init__()
        torch.manual_seed(case.seed)
        self.case = case
        width = case.width
        self.first = nn.Linear(FEATURES, width)
        self.last = nn.Linear(width, CLASSES)
        self.layers = nn.ModuleList()
        self.numbers = nn.ParameterList()
        for block in case.blocks:
            layer = nn.LayerNorm(width, eps=0.1) if block == "norm" else nn.Linear(width, width)
            self.layers.append(layer.requires_grad_(block != "frozen"))
            shape = {"scalar": (), "empty": (0, width)}.get(block, (1,))
            self.numbers.append(nn.Parameter(torch.randn(shape)))
        tied = [layer for layer, b in zip(self.layers, case.blocks, strict=True) if b == "tied"]
        for layer in tied[1:]:
            layer.weight = tied[0].weight
        self.double()
        for block, layer, dtype in zip(case.blocks, self.layers, case.dtypes, strict=False):
            if block != "tied":
                layer.to(dtype)

    def forward(self, x, some):
        h = torch.tanh(self.first(x))
        for index, block in enumerate(self.case.blocks):
            layer, number = self.layers[index], self.numbers[index]
            if block == "unused":
                continue
            if block == "some" and not some[index]:
                continue

            def apply(v, layer=layer):
                return torch.tanh(layer(v.to(layer.bias.dtype)).double())

            if block == "ckpt":
                h = h + checkpoint(apply, h, use_reentrant=False)
            elif block == "twice":
                h = apply(apply(h))
            else:
                h = h + apply(h)
            h = h * number if block == "scalar" else h + number.sum()
        return self.last(h)


def batch(case, size, number):
    generator = torch.Generator().manual_seed(1000 * case.seed + number)
    x = torch.randn(ROWS * size, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (ROWS * size,), generator=generator)
    return x, y


class Loop:
    """Runs a case in DDP on all ranks, or in one process."""

    def __init__(self, case, world, is_distributed):
        self.case = case
        self.world = world
        self.is_distributed = is_distributed  # else this process computes what all ranks do
        with torch.device("meta" if is_distributed and case.on_meta[world.rank] else "cpu"):
            self.module = Model(case)
        self.model = self.wrap() if is_distributed else self.module
        self.results = []
        self.skew = random.Random(f"{case.seed} {world.rank}")
        self.averages = self.kept = self.old = self.other = None
        self.batches = 0
        self.step = None
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=8.0, growth_interval=2, enabled=case.scaler
        )

    def wrap(self):
        return DistributedDataParallel(self.module, **self.case.options)

    def make_optimizers(self):
        parameters = [*self.module.parameters()]
        count = len(self.case.optimizers)
        self.left = parameters[-1:] if len(parameters) > 4 else []
        parameters = parameters[: len(parameters) - len(self.left)]
        self.optimizers = []
        for place, name in enumerate(self.case.optimizers):
            rank_parameters = parameters[place::count]
            half = len(rank_parameters) // 2
            groups = [
                {"params": rank_parameters[:half]},
                {"params": rank_parameters[half:], "lr": 0.01},
            ]
            self.optimizers.append(OPTIMIZERS[name]([g for g in groups if g["params"]]))

    def nap(self):
        if self.case.sleeps and self.is_distributed and self.skew.random() < 0.3:
            time.sleep(self.skew.random() * 0.05)

    def loss(self, x, y, some):
        if self.is_distributed:
            rank_rows = slice(self.world.rank, None, self.world.size)
            flags = some[self.world.rank * 16 :]
            return nn.functional.cross_entropy(self.model(x[rank_rows], flags), y[rank_rows])
        losses = []
        for rank in range(self.world.size):
            part, flags = slice(rank, None, self.world.size), some[rank * 16 :]
            losses.append(nn.functional.cross_entropy(self.model(x[part], flags), y[part]))
        return sum(losses) / len(losses)

    def next_loss(self):
        self.batches += 1
        x, y = batch(self.case, self.world.size, self.batches)
        return self.loss(x, y, self.step["some"])

    def clear(self):
        way = self.step["clear"]
        if way == "optimizer":
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        elif way == "module":
            self.module.zero_grad()
        elif way == "zeros":
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=False)
        else:
            for parameter in self.module.parameters():
                if way == "by_hand":
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    def backwards(self):
        step = self.step
        if step["place"] == "before":
            self.clear()
        for micro in range(step["micro"]):
            self.nap()
            adds = step["no_sync"] and micro + 1 < step["micro"]
            with self.model.no_sync() if adds and self.is_distributed else contextlib.nullcontext():
                losses = [self.next_loss() for _ in range(step["forwards"])]
                if step["place"] == "between" and micro == 0:
                    self.clear()
                losses = losses if step["backwards"] == "each" else [sum(losses)]
                for loss in losses:
                    self.scaler.scale(loss / step["micro"]).backward()
        return losses[-1].detach()

    def clip(self, parameters, way):
        parameters = [*parameters]
        with_gradient = [p for p in parameters if p.grad is not None]
        if way == "norm":
            self.note(nn.utils.clip_grad_norm_(parameters, 0.2))
        elif way == "inf":
            self.note(nn.utils.clip_grad_norm_(parameters, 0.05, norm_type=torch.inf))
        elif way == "value":
            nn.utils.clip_grad_value_(parameters, 0.01)
        elif way == "total":
            self.note(nn.utils.get_total_norm([p.grad for p in with_gradient]))
        elif way == "multiply":
            for parameter in with_gradient:
                parameter.grad.mul_(0.5)
        elif way == "by_groups":
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    self.clip(group["params"], "norm")

    def note(self, *values):
        self.results += [torch.as_tensor(value).detach().double().clone() for value in values]

    def run(self):
        if self.case.created == "early":
            self.make_optimizers()
        else:
            self.step = self.case.steps[0]
            self.optimizers = []
            self.next_loss().backward()
            self.module.zero_grad()
            self.make_optimizers()
        for step in self.case.steps:
            self.step = step
            self.train()
            for event in self.step["events"]:
                self.nap()
                getattr(self, event)()
        self.save_all()
        return self.results

    def train(self):
        step = self.step
        self.nap()
        takes_closure = self.case.optimizers != ["whole"] and not self.case.scaler
        if step["closure"] and takes_closure and len(self.optimizers) == 1:
            self.optimizers[0].step(self.backwards)
            return
        self.backwards()
        if step.get("reads_before_step"):
            self.clamp()
            self.alone(self.read_late)
        if self.case.scaler:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        self.clip(self.module.parameters(), step["clip"])
        stepped = False
        for optimizer, steps in zip(self.optimizers, step["stepped"], strict=False):
            if steps or self.case.scaler:
                self.scaler.step(optimizer)
                stepped = True
        if self.case.scaler and stepped:
            self.scaler.update()
        if step["place"] == "after":
            self.clear()

    @property
    def acts_alone(self):
        """Whether this is the rank that does something alone in this step."""
        return not self.is_distributed or self.world.rank == self.step["rank"]

    def save_all(self):
        for optimizer in self.optimizers:
            state = optimizer.state_dict()["state"]
            for place in sorted(state):
                self.note(*(state[place][name] for name in sorted(state[place]) if name != "none"))
        self.note(*self.module.state_dict().values())

    def alone(self, function):
        """Have one rank do something, and note its results as one."""
        if self.acts_alone:
            before = self.results
            self.results = []
            function()
            self.results = [*before, self.results]
        else:
            self.results.append(None)  # only the rank that acts has them

    def save(self):
        self.alone(self.save_all)

    def read_late(self):
        time.sleep(0.2 * self.is_distributed)  # the others have come to their step
        self.save_all()

    def evaluate_all(self):
        x, _ = batch(self.case, self.world.size, 0)
        with torch.no_grad():
            self.note(self.module(x, [True] * 16))

    def evaluate(self):
        self.alone(self.evaluate_all)

    def copy(self):
        self.alone(lambda: self.note(*copy.deepcopy(self.module).parameters()))

    def pickle(self):
        self.alone(lambda: self.note(*pickle.loads(pickle.dumps(self.module)).parameters()))

    def pickle_ddp(self):
        self.note(*pickle.loads(pickle.dumps(self.model)).parameters())

    def copy_ddp(self):
        """Train a copy for a step, as a script that looks ahead."""
        other = copy.deepcopy(self.model)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.2)
        x, _ = batch(self.case, self.world.size, self.batches)
        if self.is_distributed:
            x = x[self.world.rank :: self.world.size]
        other(x, [True] * 16).square().mean().backward()
        optimizer.step()
        self.note(*other.state_dict().values())

    def vector(self):
        parameters = self.module.parameters()
        self.note(nn.utils.parameters_to_vector([p for p in parameters if p.requires_grad]))

    def average(self):
        state = self.module.state_dict()
        if self.averages is None:
            self.averages = {name: value.clone() for name, value in state.items()}
        for name, value in state.items():
            self.averages[name].lerp_(value, 0.5)
        self.note(*self.averages.values())

    def clamp(self):
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.clamp_(-0.3, 0.3)

    def data(self):
        for parameter in [*self.module.parameters()][::2]:
            parameter.data.mul_(0.9)

    def load(self):
        now = (
            copy.deepcopy(self.module.state_dict()),
            [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers],
        )
        if self.kept is not None and len(self.kept[1]) == len(now[1]):
            self.module.load_state_dict(self.kept[0])
            for optimizer, state in zip(self.optimizers, self.kept[1], strict=True):
                if len(state["param_groups"]) == len(optimizer.param_groups):
                    optimizer.load_state_dict(state)
        self.kept = now

    def freeze(self):
        self.module.zero_grad()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.module.first.requires_grad_(not self.module.first.weight.requires_grad)

    def group(self):
        if self.left:
            self.optimizers[0].add_param_group({"params": [self.left.pop()]})

    def norm(self):
        with torch.no_grad():
            self.note(sum(parameter.square().sum() for parameter in self.module.parameters()))

    def later(self):
        """Look at a state_dict of an earlier step, which shows the values of now."""
        if self.old is not None:
            self.note(*self.old.values())
        self.old = self.module.state_dict()
        self.note(*self.old.values())

    def sleep(self):
        if self.is_distributed:
            time.sleep(self.skew.random() * 0.1)

    def barrier(self):
        if self.is_distributed:
            dist.barrier()

    def eval_mode(self):
        self.model.train(not self.model.training)

    def no_step(self):
        self.next_loss().backward()
        self.module.zero_grad()

    def look(self):
        self.note(torch.stack([p.detach().sum() for p in self.module.parameters()]))

    def alias(self):
        """Change values through `data` that is kept beyond uses of other parameters."""
        kept = [parameter.data for parameter in self.module.parameters()]
        torch._foreach_mul_(kept, 0.9)

    def views(self):
        with torch.no_grad():
            kept = [parameter.detach() for parameter in self.module.parameters()]
            self.note(torch.stack([values.square().sum() for values in kept]))

    def copy_optimizer(self):
        for optimizer in self.optimizers:
            state = copy.deepcopy(optimizer).state_dict()["state"]
            for place in sorted(state):
                self.note(*(state[place][name] for name in sorted(state[place])))

    def reset(self):
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.SGD):
                optimizer.state = collections.defaultdict(dict)

    def second(self):
        """Train another model, whose loss is of this one's output."""
        if self.other is None:
            torch.manual_seed(3)
            self.other = nn.Linear(CLASSES, CLASSES).double()
            self.rival = DistributedDataParallel(self.other) if self.is_distributed else self.other
            self.others = torch.optim.AdamW(self.other.parameters(), 0.02)
        self.module.zero_grad()
        self.others.zero_grad()
        x, _ = batch(self.case, self.world.size, self.batches)
        some = [True] * 16
        if self.is_distributed:
            x = x[self.world.rank :: self.world.size]
        self.rival(self.model(x, some)).square().mean().backward()
        self.note(nn.utils.clip_grad_norm_(self.other.parameters(), 0.3))
        self.others.step()
        self.module.zero_grad()
        self.note(*self.other.state_dict().values())

    def thrown_away(self):
        """A backward under no_sync whose gradients are cleared."""
        self.module.zero_grad()
        with self.model.no_sync() if self.is_distributed else contextlib.nullcontext():
            self.next_loss().backward()
        self.module.zero_grad(set_to_none=self.step["no_sync"])
        self.module.zero_grad()

    def rewrap(self):
        self.module.zero_grad()
        if self.is_distributed:
            self.model = self.wrap()


def differences(results, expected_results):
    """Yield how far each of a rank's results is from that of one process."""
    for index, (result, expected) in enumerate(zip(results, expected_results, strict=True)):
        if result is None:
            continue
        if isinstance(result, list):
            yield from differences(result, expected)
        else:
            assert result.shape == expected.shape, (index, result.shape, expected.shape)
            if result.numel():
                yield float((result - expected).abs().nan_to_num(torch.inf).max())


def run(case, world):
    """Return how far a case's loop is from one process, or why it is refused."""

    def find_owners(settings, world, model, optimizers):
        numbers = random.Random(case.seed)
        sharded = [
            number
            for number, parameter in enumerate(model.parameters())
            if can_be_sharded(host_parameters.as_plain(parameter))
            and numbers.random() < case.sharded
        ]
        return Owners(without_mirrors(case.shares), frozenset(sharded), case.prefetches, "")

    caps = random.Random(f"caps {case.seed}").choice([ownership.BUCKET_CAPS, (128, 512), (1, 1)])
    warnings.simplefilter("ignore")
    try:
        expected = Loop(case, world, is_distributed=False).run()
    except (AssertionError, RuntimeError, ValueError):  # of the scaler, or an empty tensor's norm
        return 0.0
    with (
        mock.patch.object(trainer_shards, "find_owners", find_owners),
        mock.patch.object(host_parameters, "is_worth_sharding", can_be_sharded),
        mock.patch.object(ownership, "BUCKET_CAPS", caps),  # of what is gathered together
    ):
        try:
            results = Loop(case, world, is_distributed=True).run()
        except UserError as error:
            if "-v" in sys.argv:
                traceback.print_exc()
            return str(error)
    return max(differences(results, expected))


def main():
    import kaitian_mpi
    from kaitian_mpi.integrations.shard.budget import LayoutSettings
    from kaitian_mpi.integrations.shard.install import Installed
    from kaitian_mpi.runtime.abort import abort_job

    world = kaitian_mpi.init()
    Installed(world, LayoutSettings())
    first, count = map(int, sys.argv[1:3])
    for seed in range(first, first + count):
        case = draw(seed, world.size)
        try:
            outcome = run(case, world)
        except BaseException:
            print(f"FAILED {seed} on rank {world.rank}", flush=True)
            raise
        if isinstance(outcome, str):
            print(f"REFUSED {seed} rank {world.rank}: {outcome}", flush=True)
            time.sleep(1)
            abort_job(3)
        if outcome > case.tolerance:
            print(f"WRONG {seed} rank {world.rank}: {outcome}", flush=True)
        if world.rank == 0 and (seed % 10 == 0 or "-v" in sys.argv):
            print(f"seed {seed} done", flush=True)
    print("END", flush=True)


if __name__ == "__main__":
    main()
