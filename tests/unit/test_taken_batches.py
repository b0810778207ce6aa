"""Which of the batches that a script has taken a forward of its model has."""

import collections
import threading
from types import SimpleNamespace

import pytest
import torch
from test_planned_batches import Planner, distributed, prepared
from torch import nn
from torch.utils.data import DataLoader

from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.planned_loaders import plan_loaders
from kaitian_mpi.integrations.taken_batches import TakenBatches, tensors_in

BATCHES, ROWS = 7, 2


class Script(Planner):
    """Trains on the batches of a loader, and notes which ones its forwards were said to have."""

    def __init__(self) -> None:
        super().__init__(0, [2, 2, 2])
        self.taken = TakenBatches()
        self.in_training = True
        self.forwards: list[tuple[int, int]] = []
        """Of each forward: the number of its batch, and of the batch that it was said to have."""
        self._numbers: dict[int, int] = {}  # by how many batches were taken before

    def batch_taken(self, iteration, rows, batch):
        self.taken.take(iteration, rows, batch, self.in_training)
        self._numbers[iteration.waiting[-1].number] = number_of(batch)

    def unplanned_loader_iterated(self, is_stream):
        self.taken.add_unplanned_loader(self.in_training, is_stream)

    def train(self, batch, inputs=None, **options):
        taken = self.taken.train(batch if inputs is None else inputs, **options)
        assert taken is not None
        self.forwards.append((number_of(batch), self._numbers[taken.number]))

    def evaluate(self, batch, inputs=None):
        self.taken.evaluate(batch if inputs is None else inputs)


def number_of(batch):
    return int(next(tensors_in(batch)).flatten()[0])


@pytest.fixture
def script():
    script = Script()
    restore = plan_loaders(script)
    yield script
    restore()


def numbered(make=distributed, first=0):
    """Return a loader; each batch of this rank begins with another number."""
    rows = torch.arange(first, first + BATCHES * ROWS * 3).float()
    collate = lambda rows: {"x": torch.stack(rows), "labels": [torch.stack(rows) + 5000]}  # noqa: E731
    loader = make(rows, 0, False, collate_fn=collate)
    if make is distributed:
        loader.sampler.shuffle = False
    return loader


def copied(batch):
    """Return a batch as on another device."""
    return {"x": batch["x"].clone()}


def changed(batch):
    """Return a batch that no tensor tells."""
    return {"x": -batch["x"]}


def ahead(batches, count, change=lambda batch: batch):
    queue = collections.deque()
    for batch in batches:
        queue.append(change(batch))
        if len(queue) > count:
            yield queue.popleft()
    yield from queue


def each(script):
    for batch in numbered():
        script.train(batch, changed(batch))


def skips(count, change):
    def run(script):
        for number, batch in enumerate(numbered()):
            if number >= count:
                script.train(batch, change(batch))

    return run


def skips_later(script):
    for number, batch in enumerate(numbered()):
        if number not in (3, 4):
            script.train(batch, changed(batch))


def views_of_memory(script):
    for batch in ahead(numbered(), 2):
        script.train(batch, (batch["x"][:1], batch["labels"][0].view(-1)))


def takes_ahead(count, change):
    def run(script):
        for batch in ahead(numbered(), count, change):
            script.train(batch)

    return run


def copies_of_batches_ahead_twice(script):
    for batch in ahead(numbered(), 1, copied):
        script.train(batch)
        script.train(batch)


def several_at_once(script):
    batches = list(numbered())
    for batch in (*batches, *reversed(batches)):
        script.train(batch)


def twice(script):
    for batch in numbered():
        script.train(batch, changed(batch))
        script.train(batch)
        script.train(batch, changed(batch))


def of_accelerate(script):
    accelerate = pytest.importorskip("accelerate.data_loader")
    made = numbered(prepared)
    own = made.batch_sampler.original
    loader = accelerate.DataLoaderShard(
        made.dataset, device="cpu", batch_sampler=own, collate_fn=made.collate_fn
    )
    for batch in loader:
        script.train(batch, changed(batch))
        script.train(batch, changed(batch))


def as_the_trainer_accumulates(script):
    batches = iter(numbered())
    while some := [batch for _, batch in zip(range(3), batches, strict=False)]:
        for batch in some:
            script.train(batch, changed(batch), in_order=True)


def validates(in_training, take):
    def run(script):
        held_out = numbered(first=1000)
        for batch in numbered():
            script.in_training = in_training
            for other in take(held_out):
                script.evaluate(other, changed(other))
            script.in_training = True
            script.train(batch, changed(batch))
            script.train(batch, changed(batch))

    return run


def looks_at_each_first(script):
    for batch in numbered():
        script.evaluate(batch, changed(batch))
        script.train(batch, changed(batch))
        script.evaluate(batch, changed(batch))
        script.train(batch, changed(batch))


def two_in_turns(script):
    for batch, _ in zip(numbered(), range(3), strict=False):
        script.train(batch, changed(batch))
    for batch in numbered(first=1000):
        script.train(batch, changed(batch))


def objects(script):
    loader = numbered()
    loader.collate_fn = lambda rows: SimpleNamespace(x=torch.stack(rows))
    for batch in ahead(loader, 1):
        script.train(batch)


def ends_early(script):
    for _ in range(2):
        batch = next(iter(numbered()))
        script.train(batch, changed(batch))
        script.train(batch, changed(batch))


@pytest.mark.parametrize(
    "run",
    [
        each, skips(1, copied), skips(5, copied), skips_later,
        views_of_memory, takes_ahead(1, copied), takes_ahead(4, copied),
        copies_of_batches_ahead_twice, several_at_once, twice, of_accelerate,
        as_the_trainer_accumulates, validates(False, iter), validates(True, iter),
        validates(True, lambda loader: [next(iter(loader))]), looks_at_each_first, two_in_turns,
        objects, ends_early,
    ],
)  # fmt: skip
def test_a_forward_has_its_batch(script, run):
    run(script)
    assert len(script.forwards) >= 2
    assert [said for _, said in script.forwards] == [batch for batch, _ in script.forwards]


def zipped(script):
    for one, _ in zip(numbered(), numbered(first=1000), strict=True):
        script.train(one)


def threaded(script):
    taken = []
    thread = threading.Thread(target=lambda: taken.extend(numbered()))
    thread.start()
    thread.join()
    script.train(taken[0])


def of_two_batches(script):
    script.plan.shares = [1, 1, 4]
    loader = numbered()
    loader.batch_sampler.trains = True
    batches = iter(loader)
    first = next(batches)
    script.plan.shares = [4, 1, 1]
    script.train({"both": [first, next(batches)]})


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (zipped, "this step has batches of two, as zip"),
        (threaded, "another thread takes ahead"),
        (of_two_batches, "tensors are of two batches"),
        (takes_ahead(1, changed), "cannot tell which of the last 2 batches"),
        (skips(3, changed), "cannot tell which of the last 4 batches"),
    ],
)
def test_what_cannot_be_told_is_refused_at_the_first_forward(script, run, message):
    with pytest.raises(UserError, match=message):
        run(script)
    assert not script.forwards


def test_a_loader_that_is_not_cut_is_not_taken_for_one_that_is(script):
    each(script)
    for (x,) in DataLoader(torch.utils.data.TensorDataset(torch.randn(4, 2))):
        assert script.taken.train(x) is None


def test_the_memory_of_batches_is_forgotten(script):
    for _ in range(30):
        for batch in numbered():
            script.train(batch, (nn.Linear(2, 2), batch))
    assert len(script.taken._owners) < 200


def test_copies_with_missing_values_are_known(script):
    loader = numbered()
    loader.dataset[1::2] = torch.nan  # the second row of each batch
    for batch in ahead(loader, 1, lambda batch: batch | copied(batch)):
        assert script.taken.train(copied(batch)) is script.taken.train(batch)
