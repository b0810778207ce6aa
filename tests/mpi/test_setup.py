"""Before training, model and data are made the same on all ranks."""

import logging
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from kaitian_mpi import data_parallel
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.recipes import image_classification
from kaitian_mpi.recipes.class_count import count_classes
from kaitian_mpi.recipes.data_source import DataSource
from kaitian_mpi.recipes.image_classification import make_task
from kaitian_mpi.recipes.user_data import batches_of_pairs
from kaitian_mpi.train.setup import check_same_samples, prepare_without_folder

pytestmark = pytest.mark.sizes(1, 3)


class Unseeded(nn.Module):
    """A model initialized by numpy, with a different seed on each rank."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.layer = nn.Linear(4, num_classes)
        self.norm = nn.BatchNorm1d(num_classes)
        self.factor = nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)
        self.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("salt", torch.ones(2, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(64, dtype=torch.bool), persistent=False)
        self.register_buffer("window", torch.ones(6, 2)[:, 0])  # strided
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.copy_(torch.from_numpy(np.asarray(np.random.randn(*tensor.shape) > 0)))
            self.layer.weight.copy_(torch.from_numpy(np.random.randn(num_classes, 4)))

    def forward(self, x):
        return self.norm(self.layer(x))


def values_of(model):
    """Return all parameters and buffers of a model as Python values."""
    tensors = (*model.parameters(), *model.buffers())
    return [torch.view_as_real(t).tolist() if t.is_complex() else t.tolist() for t in tensors]


@pytest.mark.parametrize("way", ["a training", "data_parallel"])
def test_every_rank_starts_with_rank_0s_weights_and_buffers(world, monkeypatch, way):
    np.random.seed(world.rank)
    model = Unseeded()
    rank_values = values_of(model)
    if way == "data_parallel":
        shared_values = values_of(data_parallel(model).module)
    else:
        monkeypatch.setattr(image_classification, "build_model", lambda *_: model)
        config = TrainConfig(model="test:unseeded", dataset="synthetic")
        setup = prepare_without_folder(partial(make_task, config), config, world)
        shared_values = values_of(setup.task.model)
    assert (shared_values == rank_values) == (world.rank == 0)
    assert shared_values == gather_values(world.comm, rank_values)[0]


def make_data(inputs, labels):
    return batches_of_pairs(TensorDataset(inputs, labels))


INPUTS, LABELS = torch.arange(50.0).reshape(50, 1), torch.arange(50) % 7


def test_data_listed_in_another_order_on_a_host_is_rejected(world, caplog):
    check_same_samples(world, "training", make_data(INPUTS, LABELS))
    if world.size == 1:
        return
    order = torch.randperm(50, generator=torch.Generator().manual_seed(min(world.rank, 1)))
    message = r"the training data differs .* 1x1 float32, 1 int64 \[\d\] on rank 0"
    with pytest.raises(AgreedError, match=message):
        check_same_samples(world, "training", make_data(INPUTS[order], LABELS[order]))
    check_same_samples(world, "training", make_data(INPUTS + world.rank, LABELS))
    was_logged = "the inputs of 16 of 16 training samples differ" in caplog.text
    assert was_logged == (world.rank == 0)


class Pairs(Dataset):
    """Samples of seven classes that can be read once each, if not broken."""

    def __init__(self, broken=None):
        self.broken = broken
        self.read = []

    def __len__(self):
        return 50

    def __getitem__(self, index):
        if index == self.broken:
            raise OSError("disk gone")
        self.read.append(index)
        return torch.zeros(2), index % 7


def test_classes_are_counted_by_reading_each_sample_once_over_all_ranks(world, caplog):
    caplog.set_level(logging.INFO)
    data = Pairs()
    source = DataSource(None, None, 3, (data, data))
    counted = count_classes("my:data", source, world)
    assert (counted.num_classes, counted.to_count) == (7, ())
    by_rank = gather_values(world.comm, data.read)
    assert sorted(chain(*by_rank)) == sorted([*range(50)] * 2)
    told = "counting the classes of the dataset by reading its 100 samples, each rank a part"
    assert (told in caplog.text) == (world.rank == 0)
    assert count_classes("my:data", DataSource(None, None, 3), world).num_classes == 3
    broken = DataSource(None, None, 0, (Pairs(broken=49),))  # which the last rank reads
    with pytest.raises(AgreedError, match="counting its classes raised OSError: disk gone; give"):
        count_classes("my:data", broken, world)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("part", ["training", "validation"])
def test_a_run_starts_only_if_all_ranks_have_the_same_data(world, monkeypatch, part):
    parts = [make_data(INPUTS, LABELS), make_data(INPUTS, (LABELS + world.rank) % 7)]
    data = DataSource(*(parts if part == "validation" else parts[::-1]), num_classes=7)
    monkeypatch.setattr(image_classification, "load_data", lambda config: data)
    config = TrainConfig(model="cnn")
    with pytest.raises(AgreedError, match=f"the {part} data differs .* int64 "):
        prepare_without_folder(partial(make_task, config), config, world)
