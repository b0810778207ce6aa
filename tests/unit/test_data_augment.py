"""Images in memory, their augmentation, and digests by which ranks compare their samples."""

import hashlib
import itertools
import random
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from kaitian_mpi.recipes.images import ImageArrays, crop, draw_crops_and_flips
from kaitian_mpi.recipes.user_data import batches_of_pairs
from kaitian_mpi.train.data import sample_digest
from kaitian_mpi.train.data.batches import as_batches
from kaitian_mpi.train.data.sample_digest import digest_samples
from kaitian_mpi.train.data.sampler import _mix


@pytest.fixture(scope="module")
def arrays():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (50, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return ImageArrays(images, torch.arange(50) % 10, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


def test_images_are_normalized_cropped_by_uniform_shifts_and_mirrored(arrays):
    inputs, labels = arrays[[3, 1, 3]]
    assert (inputs.dtype, labels.dtype, labels.tolist()) == (torch.float32, torch.int64, [3, 1, 3])
    mean, std = torch.tensor(arrays.mean), torch.tensor(arrays.std)
    expected = (arrays.images[3].permute(1, 2, 0) / 255 - mean) / std
    torch.testing.assert_close(inputs[0].permute(1, 2, 0), expected)
    assert torch.equal(inputs[0], inputs[2])
    for dataset in (arrays, replace(arrays, augment="crop-flip")):
        inputs, labels = dataset[[]]
        assert (inputs.shape, inputs.dtype) == ((0, 3, 32, 32), torch.float32)
        assert (labels.shape, labels.dtype, len(dataset)) == ((0,), torch.int64, 50)
    everything = list(range(50))
    plain, _ = replace(arrays, augment="crop")[everything]
    mirrored, _ = replace(arrays, augment="crop-flip")[everything]
    _, _, flags = draw_crops_and_flips(0, 0, everything, 4)
    assert 10 < int(flags.sum()) < 40
    for index, flag in enumerate(flags.tolist()):
        expected = plain[index].flip(2) if flag else plain[index]
        assert torch.equal(mirrored[index], expected)
    # The first outputs of splitmix64 seeded with 1234567, as published with its C source.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    steps = np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert _mix(np.uint64(1234567) + steps).tolist() == expected
    count = 90_000
    down, right, mirrored = draw_crops_and_flips(0, 0, range(count), 4)
    cells = torch.bincount(down * 9 + right, minlength=81).double()
    expected = count / 81
    # Chi-squared with 80 degrees of freedom: 143 is passed once in 100,000.
    assert float(((cells - expected) ** 2 / expected).sum()) < 143
    assert abs(float(mirrored.double().mean()) - 0.5) < 0.01
    image = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 8, 8)
    still, down = torch.tensor([1]), torch.tensor([2])
    assert torch.equal(crop(image, still, still), image)
    shifted = crop(image, down, still)
    assert torch.equal(shifted[..., :-1, :], image[..., 1:, :])
    assert not shifted[..., -1, :].any()


@pytest.mark.parametrize("kind", ["crop", "crop-flip"])
def test_augmentation_depends_only_on_the_sample_the_epoch_and_the_seed(arrays, kind):
    augmented = replace(arrays, augment=kind, seed=5)
    augmented.set_epoch(3)
    order = np.random.default_rng(0).permutation(50).tolist()
    together = augmented[order]
    for parts in ([[index] for index in order], [order[:7], order[7:]]):
        inputs, labels = map(torch.cat, zip(*(augmented[part] for part in parts), strict=True))
        assert torch.equal(together[0], inputs)
        assert torch.equal(together[1], labels)
    batches = []
    for seed, epoch in itertools.product(range(3), range(3)):
        augmented = replace(arrays, augment=kind, seed=seed)
        augmented.set_epoch(epoch)
        batches.append(augmented[order][0])
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(batches, 2))


class Samples(Dataset):
    """Sample i is [i, i] with class i % 3, optionally with random augmentation."""

    def __init__(self, order, is_random=False):
        self.order, self.is_random = list(order), is_random

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        value = self.order[index]
        if value == -1:
            raise OSError("cannot be read")
        inputs = torch.full((2,), float(value))
        if self.is_random:
            inputs += torch.rand(2) + np.random.rand() + random.random()
        return inputs, value % 3

    def __getitems__(self, indices):
        raise AssertionError("counts what is fetched for training")


def digests(order, **options):
    return digest_samples(batches_of_pairs(Samples(order, **options)))


def test_digests_depend_on_data_and_order_and_not_on_random_augmentation():
    assert digests(range(100)) == digests(range(100))
    assert [len(digests(data)) for data in (range(100), range(1), range(2, 5))] == [16, 1, 3]
    assert digests([0, -1, 2])[-1] == ("sample 1 raises OSError", "")
    shuffled = random.Random(1).sample(range(100), 100)
    texts = [[text for text, _ in digests(order)] for order in (range(100), shuffled)]
    assert texts[0] != texts[1]
    assert texts[0][0] == "sample 99: 1x2 float32, 1 int64 [0]"
    one, other = digests(range(0, 300, 3)), digests(range(3, 303, 3))  # of other inputs alone
    assert [text for text, _ in one] == [text for text, _ in other]
    assert {digest for _, digest in one}.isdisjoint(digest for _, digest in other)

    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    one = digests(range(20), is_random=True)
    assert states() == before
    torch.rand(7), np.random.rand(7), random.random()
    assert digests(range(20), is_random=True) == one
    assert one != digests(range(20))


def nested(layout):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


@pytest.mark.filterwarnings("ignore")
def test_whatever_a_loader_takes_is_compared_as_far_as_it_can_be():
    ramp = torch.arange(1.0, 7.0).view(2, 3)
    compared = [
        *(ramp, ramp.to(torch.bfloat16), ramp.to(torch.float8_e4m3fn), ramp.to(torch.uint16)),
        *((ramp * 1j).conj(), (ramp * 1j).conj().imag, ramp.t(), ramp.requires_grad_()),
        *(np.array(["a", "bc"]), np.arange(4)[::-1], np.array(["2026-01-01"], "datetime64[D]")),
        *(np.zeros(3, ">f4"), np.float16(1), np.bool_(True), np.datetime64("2026"), 0.5),
    ]
    left_out = [
        *(ramp.to_sparse(), ramp.to_sparse_csr(), nested(torch.strided), nested(torch.jagged)),
        *(ramp.to("meta"), np.array([{}, None], dtype=object), np.zeros(2, [("a", "O")])),
        *(np.zeros(3, np.longdouble), object(), None, {1, 2}, np.str_("a"), "a", 7),
    ]
    nothing = hashlib.sha256().hexdigest()[:16]
    for leaf in [*compared, *left_out]:
        ((text, digest),) = digest_samples(as_batches([leaf], lambda samples: samples))
        assert text.startswith("sample 0: ")
        assert (digest == nothing) == any(leaf is one for one in left_out), text
    texts = [
        digest_samples(as_batches([leaf], lambda samples: samples))[0][0]
        for leaf in (np.array(["/mnt/a", "/mnt/b"]), np.arange(4)[::-1], np.str_("a"))
    ]
    assert texts == ["sample 0: 2 text", "sample 0: 4 int64 [3, 2, 1, 0]", "sample 0: a"]


def test_reading_stops_when_the_time_is_up(monkeypatch):
    monkeypatch.setattr(sample_digest, "_MAX_SEC", 0.02)
    monkeypatch.setattr(sample_digest, "_digest", lambda data, index: time.sleep(0.01))
    assert 1 <= len(digests(range(100))) <= 3
