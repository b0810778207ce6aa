"""Random loops over DDP with adaptive batches, each compared with one process in float64.

mpirun -np 3 python tests/mpi/adaptive_cases.py FIRST_SEED CASES
"""

import copy
import dataclasses
import itertools
import random
import sys
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)

from kaitian_mpi.errors import AgreedError

FEATURES, WORDS, CLASSES, IGNORED = 5, 4, 3, -100


@dataclass
class Case:
    """A loop; every rank draws the same from a seed."""

    seed: int
    rows: int
    batch: int
    epochs: int
    shuffle: bool
    drop_last: str
    """Of the "sampler", the "loader", or neither."""
    skipped: int
    """Batches of the first epoch that are not trained on, as after a resume."""
    new_loaders: bool
    accumulated: int
    loss: str
    """What the model returns: "tokens", "shifted", "rows", "sum", or "" for its scores only."""
    trains_on: str
    """What the script trains on: "returned", "beside", "both"."""
    passes: str
    """How labels are passed: "keyword" or "positional"."""
    models: str
    """How they are in DDP: "one", "chain", "features", "itself", "views", or "rivals"."""
    mode: str
    """When the model is in eval mode: "never", "always", or "later"."""
    norm: bool
    frozen: bool
    evaluates: str
    """What is evaluated after an epoch: "", "without" gradients, or "with" them."""
    alike: bool
    """Whether the rows of the first half have as many labels each."""
    equal: bool
    """Whether all plans are equal."""
    stream: str
    """Whether each rank has a part of one ("own"), all read one ("shared"), or there is none."""
    workers: int
    batches: str
    """How a batch sampler's own batches of different sizes are divided: "whole", "mixed", or ""."""


def draw(seed, size):
    numbers = random.Random(seed)
    pick = numbers.choice
    batch = numbers.randint(1, 5)
    rows = numbers.randint(size, 5 * batch * size + 3)
    mode = pick(["never"] * 3 + ["always", "later"])
    norm = mode == "never" and pick([True, False, False])
    if norm and rows % (batch * size) == 1:
        rows += 1  # torch normalizes no single row
    if norm and batch * size == 1:
        batch += 1
    loss = pick(["", "tokens", "shifted", "rows", "sum"])
    if loss == "shifted" and batch == 1:
        loss = "tokens"  # single rows cannot tell which labels count: all are taken, as a line says
    batches = -(-rows // (batch * size))
    stream, workers = pick(["", "", "own", "shared"]), pick([0] * 8 + [1, 2])
    if stream == "own":
        rows += 2 * batch * size * max(workers, 1)
    # Parts of a stream may have no more batches; the last batch may be single rows.
    most_skipped = 0 if stream == "own" or loss == "shifted" else batches - 1
    return Case(
        seed=seed,
        rows=rows,
        batch=batch,
        epochs=numbers.randint(1, 3),
        shuffle=pick([True, False]),
        drop_last=pick(["", "", "sampler", "loader"]),
        skipped=pick([0, 0, numbers.randint(0, most_skipped), most_skipped]),
        new_loaders=pick([True, False]),
        accumulated=pick([1, 1, 2, 3]),
        loss=loss,
        trains_on=pick(["returned", "returned", "beside", "both"]) if loss else "beside",
        passes=pick(["keyword", "positional"]),
        models=pick(["one", "one", "chain", "features", "itself", "views", "rivals"]),
        mode=mode,
        norm=norm,
        frozen=pick([True, False, False]),
        evaluates=pick(["", "without", "with"]),
        alike=pick([True, False]),
        equal=pick([True, False, False]),
        stream=stream,
        workers=workers,
        batches="" if stream or loss == "shifted" else pick(["", "", "whole", "mixed"]),
    )


class Body(nn.Module):
    """Returns features of the inputs."""

    def __init__(self, case):
        super().__init__()
        self.frozen = nn.Linear(FEATURES, FEATURES)
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.norm = nn.BatchNorm1d(FEATURES) if case.norm else nn.Identity()
        self.frozen.requires_grad_(not case.frozen)

    def forward(self, x):
        x = self.layer(self.frozen(x).tanh())
        return self.norm(x.flatten(0, 1)).view_as(x).tanh()


class Head(nn.Module):
    """Returns scores of the features, and a loss of them if the case has one."""

    def __init__(self, case):
        super().__init__()
        self.layer, self.loss = nn.Linear(FEATURES, CLASSES), case.loss

    def forward(self, x, labels=None):
        scores = self.layer(x)
        if not self.loss:
            return scores
        first = self.loss == "shifted"
        labels, kept = labels[:, first:], scores[:, first:]
        losses = cross_entropy(kept.mT, labels, reduction="none")
        counted = labels.ne(IGNORED).sum(1)
        if self.loss == "sum":
            return {"loss": losses.sum() / 7, "scores": scores}
        if self.loss == "rows":
            return {"loss": (losses.sum(1) / counted.clamp(min=1)).mean(), "scores": scores}
        return {"loss": losses.sum() / counted.sum(), "scores": scores}


class Whole(nn.Module):
    """A body and a head in one model."""

    def __init__(self, case):
        super().__init__()
        self.body, self.head = Body(case), Head(case)

    def forward(self, x, labels=None):
        return self.head(self.body(x), labels)


class Models(nn.Module):
    """What a script trains, in DDP or not."""

    def __init__(self, case):
        super().__init__()
        torch.manual_seed(case.seed)
        self.case = case
        if case.models in ("chain", "features", "itself", "rivals"):
            self.parts = nn.ModuleList([Body(case), Head(case)])
        else:
            self.parts = nn.ModuleList([Whole(case)])
        self.double()

    def wrapped(self):
        """Return the same in DDP."""
        made = copy.copy(self)
        made._modules = dict(self._modules)
        made.parts = nn.ModuleList(map(DistributedDataParallel, self.parts))
        return made

    def backward(self, x, labels):
        """Compute the gradients of a batch; rivals have two losses one after the other."""
        if self.case.models == "rivals":
            made = self.parts[0](x).detach()
            losses = (self.loss_of_features(inputs, labels) for inputs in (x, made))
            sum(losses).backward()
        self.loss_of(x, labels).backward()

    def loss_of(self, x, labels):
        case = self.case
        if case.models == "views":
            return sum(self.loss_of_features(view, labels) for view in (x, -x))
        if len(self.parts) == 1:
            return self.loss_of_features(x, labels)
        features = self.parts[0](x)
        if case.models == "itself":
            features = self.parts[0](features)
        loss = self.loss_of_features(features, labels)
        return loss + features.square().mean() if case.models == "features" else loss

    def loss_of_features(self, features, labels):
        case = self.case
        if not case.loss:
            scores = self.parts[-1](features)
        else:
            positional = case.passes == "positional"
            named = {} if positional else {"x": features, "labels": labels}
            output = self.parts[-1](*((features, labels) if positional else ()), **named)
            scores = output["scores"]
        beside = (1 - scores.softmax(-1)[:, -1, 0]).square().mean()
        if case.trains_on == "beside":
            return beside
        return output["loss"] + beside if case.trains_on == "both" else output["loss"]


def data_of(case):
    generator = torch.Generator().manual_seed(case.seed)
    x = torch.randn(case.rows, WORDS, FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (case.rows, WORDS), generator=generator)
    ignored = torch.rand(case.rows, WORDS, generator=generator) < 0.4
    ignored[:, -1] = False
    if case.alike:
        ignored[: case.rows // 2] = torch.tensor([False, True, False, False])
    labels[ignored] = IGNORED
    return TensorDataset(x, labels, torch.arange(case.rows))


def shares_of(case, size, step):
    """Return a random plan of a step."""
    total = case.batch * size
    if case.equal or size == 1:
        return [case.batch] * size
    numbers = random.Random(f"{case.seed} {step}")
    cuts = sorted(numbers.sample(range(1, total), size - 1))
    return [b - a for a, b in itertools.pairwise([0, *cuts, total])]


class Stream(IterableDataset):
    """Yields some rows of the data, in the order of an epoch; workers share them."""

    def __init__(self, case, rank=0, size=1):
        self.data, self.case, self.epoch, self.rank, self.size = data_of(case), case, 0, rank, size

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        numbers = random.Random(f"{self.case.seed} {self.epoch}")
        order = list(range(self.case.rows))
        if self.case.shuffle:
            numbers.shuffle(order)
        least = 2 * self.case.batch * max(self.case.workers, 1)  # as one may be taken ahead
        spare = len(order) - least * self.size
        if self.size > 1 and spare > 0:
            cuts = sorted(numbers.choices(range(spare + 1), k=self.size - 1))
            cuts = [least * number + cut for number, cut in enumerate([0, *cuts, spare])]
        else:
            cuts = [len(order) * number // self.size for number in range(self.size + 1)]
        part = order[cuts[self.rank] : cuts[self.rank + 1]]
        info = get_worker_info()
        part = part if info is None else part[info.id :: info.num_workers]
        return (self.data[row] for row in part)


class Batches:
    """A batch sampler with batches of its own, the same on each rank."""

    def __init__(self, case):
        self.case, self.epoch, self.rows_may_be_mixed = case, 0, case.batches == "mixed"

    def set_epoch(self, epoch):
        self.epoch = epoch

    def batches(self, epoch):
        numbers, rows = random.Random(f"{self.case.seed} {epoch}"), [*range(self.case.rows)]
        if self.case.shuffle:
            numbers.shuffle(rows)
        while rows:
            count = numbers.randint(1 + self.case.norm, 2 * self.case.batch)
            yield rows[:count]
            rows = rows[count:]

    def __iter__(self):
        return self.batches(self.epoch)

    def __len__(self):
        return sum(1 for _ in self)


class Loop:
    """Trains a case's models in DDP, and the same models in one process, on the same rows."""

    def __init__(self, case, adaptive):
        self.case, self.adaptive, self.size = case, adaptive, adaptive.size
        self.data = data_of(case)
        self.alone = Models(case)
        model = copy.deepcopy(self.alone)
        self.distributed = nn.SyncBatchNorm.convert_sync_batchnorm(model) if case.norm else model
        self.model = self.distributed.wrapped()
        self.optimizers = [
            torch.optim.SGD(m.parameters(), lr=0.2) for m in (self.distributed, self.alone)
        ]
        self.steps = 0
        self.seen = []
        adaptive.has_new_plan = self.new_plan

    def new_plan(self):
        plan = next(iter(self.adaptive._plans._plans.values()), None)
        if plan is None:
            return False
        batch = sum(plan.shares) // self.size  # another one if a batch sampler has its own
        plan.shares = shares_of(dataclasses.replace(self.case, batch=batch), self.size, self.steps)
        return True

    def loader(self):
        case = self.case
        if case.stream:
            return self.loader_of_a_stream()
        if case.batches:
            from accelerate.data_loader import BatchSamplerShard

            shard = BatchSamplerShard(Batches(case), self.size, self.adaptive.rank)
            return DataLoader(self.data, batch_sampler=shard)
        sampler = DistributedSampler(
            self.data, shuffle=case.shuffle, drop_last=case.drop_last == "sampler"
        )
        whole = case.drop_last == "loader"
        return DataLoader(self.data, case.batch, sampler=sampler, drop_last=whole)

    def loader_of_a_stream(self):
        case, drop_last = self.case, self.case.drop_last == "loader"
        rank, size = self.adaptive.rank, self.size
        if case.stream == "own":
            rows = Stream(case, rank, size)
        else:
            from accelerate.data_loader import IterableDatasetShard

            rows = IterableDatasetShard(Stream(case), case.batch, drop_last, size, rank)
        workers = {"num_workers": case.workers}
        if case.workers:
            workers |= {"prefetch_factor": 1 + case.seed % 3}
            workers |= {"persistent_workers": bool(case.seed % 2)}
        return DataLoader(rows, case.batch, drop_last=drop_last, **workers)

    def train(self):
        loader = self.loader()
        for epoch in range(self.case.epochs):
            if epoch and self.case.new_loaders:
                loader = self.loader()
            in_eval_mode = self.case.mode == "always" or (self.case.mode == "later" and epoch > 0)
            for models in (self.model, self.alone):
                models.train(not in_eval_mode)
            self.set_epoch(loader, epoch)
            self.seen.append([])
            for index, (batch, is_last) in enumerate(self.batches(loader)):
                if epoch or index >= self.case.skipped:
                    self.step(*batch, is_last)
            if self.case.evaluates:
                self.evaluate()

    def set_epoch(self, loader, epoch):
        if self.case.batches:
            loader.batch_sampler.batch_sampler.set_epoch(epoch)
        else:
            (loader.dataset if self.case.stream else loader.sampler).set_epoch(epoch)

    def batches(self, loader):
        """Yield each batch, and whether the gradients are applied after it in any case."""
        case = self.case
        if not case.stream:
            length = len(loader)
            yield from ((batch, index == length - 1) for index, batch in enumerate(loader))
        elif case.models != "one" or case.mode != "never":
            yield from ((batch, True) for batch in loader)
        else:  # the next one is taken before, as by trainers that look for the last one
            ahead = itertools.chain(loader, [None])
            batch = next(ahead)
            for following in ahead:
                yield batch, following is None
                batch = following

    def step(self, x, labels, rows, is_last):
        self.steps += 1
        steps_now = is_last or self.steps % self.case.accumulated == 0
        with ExitStack() as stack:
            for part in self.model.parts if not steps_now else ():
                stack.enter_context(part.no_sync())
            self.model.backward(x, labels)
        ranks = [None] * self.size
        is_counted = not self.case.stream or self.adaptive.forwards._train_batch.rows.this_rank > 0
        dist.all_gather_object(ranks, rows.tolist() if is_counted else [])
        whole = list(dict.fromkeys(row for part in ranks for row in part))
        self.seen[-1] += whole
        x, labels, _ = self.data[whole]
        self.backward_alone(x, labels)
        if steps_now:
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def backward_alone(self, x, labels):
        """Compute the gradient of the global batch; DDP averages what one process adds up."""
        case = self.case
        if case.loss != "sum" or case.trains_on == "beside":
            self.alone.backward(x, labels)
            return
        heads = [part for part in self.alone.modules() if isinstance(part, Head)]
        handles = [head.register_forward_hook(self.divide_sum) for head in heads]
        self.alone.backward(x, labels)
        for handle in handles:
            handle.remove()

    def divide_sum(self, head, inputs, output):
        return {**output, "loss": output["loss"] / self.size}

    def evaluate(self):
        modes = self.model.training
        self.model.eval()
        held_out = DataLoader(self.data, 3, sampler=DistributedSampler(self.data, shuffle=False))
        with torch.set_grad_enabled(self.case.evaluates == "with"):
            counts = [(self.model.loss_of(x, labels), len(x))[1] for x, labels, _ in held_out]
        # With gradients in eval mode, it may as well be a training.
        if self.case.mode == "never" or self.case.evaluates == "without":
            assert sum(counts) == -(-self.case.rows // self.size)
        self.model.train(modes)

    def difference(self):
        pairs = zip(
            self.distributed.state_dict().values(), self.alone.state_dict().values(), strict=True
        )
        return max(float((a - b).abs().max()) for a, b in pairs if a.is_floating_point())

    def check_rows(self):
        """Check that each row comes once an epoch, but for those that are left out."""
        case, size = self.case, self.size
        if case.stream:
            self.check_streams()
            return
        if case.batches:
            for epoch, seen in enumerate(self.seen):
                batches = list(Batches(case).batches(epoch))
                left = batches[case.skipped * size :] if epoch == 0 else batches
                assert sorted(seen) == sorted(row for batch in left for row in batch)
            return
        total = case.rows // size * size if case.drop_last == "sampler" else case.rows
        per_rank = total // size if case.drop_last == "sampler" else -(-case.rows // size)
        whole = case.drop_last == "loader"
        batches = per_rank // case.batch if whole else -(-per_rank // case.batch)
        expected = min(total, batches * case.batch * size)
        for epoch, seen in enumerate(self.seen):
            skipped = min(case.skipped * case.batch * size, expected) if epoch == 0 else 0
            count = expected - skipped
            assert len(set(seen)) == len(seen), f"epoch {epoch}: rows twice"
            assert len(seen) >= count > len(seen) - case.batch * size, (epoch, len(seen), count)

    def check_streams(self):
        """Check that each row comes once an epoch, but for those that are left out."""
        case, full = self.case, self.case.batch * self.size
        for epoch, seen in enumerate(self.seen):
            assert len(set(seen)) == len(seen), f"epoch {epoch}: rows twice"
            if case.drop_last == "loader":
                assert len(seen) % full == 0
                least = (
                    case.rows - full * max(case.workers, 1) + 1 if case.stream == "shared" else 0
                )
            else:
                least = case.rows
            skipped = case.skipped * full if epoch == 0 else 0
            assert len(seen) >= least - skipped, f"epoch {epoch}: {len(seen)} rows of {least}"


def run(case, adaptive):
    """Return how far the models are from those of one process, or why they are not trained."""
    loop = Loop(case, adaptive)
    try:
        loop.train()
    except AgreedError as error:
        return str(error)
    loop.check_rows()
    return loop.difference()


def main():
    import kaitian_mpi
    from kaitian_mpi.integrations.adaptive import install

    world = kaitian_mpi.init()
    first, count = map(int, sys.argv[1:])
    refused = wrong = 0
    for seed in range(first, first + count):
        adaptive = install(world)
        case = draw(seed, world.size)
        try:
            outcome = run(case, adaptive)
        except BaseException:
            print(f"FAILED {case}", flush=True)
            raise
        adaptive.close()
        if world.rank == 0:
            is_refused = isinstance(outcome, str)
            refused += is_refused
            if is_refused or outcome > 1e-9:
                wrong += not is_refused
                print(f"{'REFUSED' if is_refused else 'WRONG'} {outcome} {case}", flush=True)
    if world.rank == 0:
        print(f"CASES {count}: {wrong} wrong, {refused} refused", flush=True)


if __name__ == "__main__":
    main()
