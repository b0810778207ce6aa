"""The formats for slow links, and what is kept of what they round off."""

import pytest
import torch

from kaitian_mpi.distributed.network.formats import FORMATS
from kaitian_mpi.distributed.residual import Residual, Residuals

BYTES = {"bf16": 0.5, "int8": 0.254, "int4": 0.129}
ROUNDING = {"bf16": 2**-8, "int8": 0.51 / 127, "int4": 0.51 / 7}


def arrived(name, values):
    encoded = FORMATS[name].encode(values.clone(), torch.empty_like(values))
    decoded = torch.empty_like(values)
    FORMATS[name].decode(encoded, decoded)
    return decoded


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 5000, 70_000])
def test_values_arrive_to_within_a_rounding(name, count):
    wire = FORMATS[name]
    values = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 1e-6
    given, lost = values.clone(), torch.full_like(values, 9.0)
    encoded = wire.encode(given, lost)
    assert encoded.dtype is torch.uint8
    assert encoded.shape == (wire.size(count),)
    decoded = torch.full_like(values, 9.0)
    wire.decode(encoded, decoded)
    # Bit by bit, signs of zeros included: the sender takes what the others get.
    assert torch.equal(decoded.view(torch.int32), given.view(torch.int32))
    torch.testing.assert_close(decoded + lost, values, rtol=1e-6, atol=0.0)
    for part, received in zip(values.split(256), decoded.split(256), strict=True):
        if part.numel():
            assert (part - received).abs().max() <= ROUNDING[name] * part.abs().max()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_and_zeros_stay(name, bad):
    assert FORMATS[name].size(1 << 20) / (4 << 20) == pytest.approx(BYTES[name], abs=1e-3)
    values = torch.ones(600)
    values[300] = bad
    decoded = arrived(name, values)
    assert not decoded[300].isfinite()
    assert torch.equal(decoded[:256], torch.ones(256))
    values = torch.zeros(600)
    values[256:] = 1e-45
    assert name == "bf16" or not arrived(name, values).any()


def test_a_residual_changes_only_when_the_step_is_done():
    residual = Residual(FORMATS["int8"], 4)
    residual.room(1, 2).fill_(1)
    values = torch.zeros(4)
    residual.add_to(values, 0)
    assert not values.any()
    residual.keep()
    residual.add_to(values, 0)
    assert values.tolist() == [0, 1, 1, 0]
    residual.room(1, 2).fill_(torch.nan)
    residual.keep()  # of a step that all ranks skip
    assert residual.value.tolist() == [0, 1, 1, 0]


def test_residuals_follow_their_parameters_to_other_buffers_and_runs():
    residuals = Residuals("int4")
    buffer = torch.zeros(5)
    residual = residuals.add(buffer, {"a": slice(0, 2), "b": slice(2, 4)})
    assert residual.count == 4  # what follows the gradients crosses as it is
    residual.room(0, 4).copy_(torch.arange(4.0))
    residuals.keep()
    residuals.clear()
    first = residuals.add(torch.zeros(2), {"b": slice(0, 2)})
    second = residuals.add(torch.zeros(2), {"a": slice(0, 2)})
    assert first.value.tolist() == [2, 3]
    assert second.value.tolist() == [0, 1]
    later = Residuals("int4")
    later.load_state_dict(residuals.state_dict())
    assert later.add(buffer, {"a": slice(0, 2), "b": slice(2, 4)}).value.tolist() == [0, 1, 2, 3]
    third = later.add(buffer, {"c": slice(0, 4)})
    assert third.value is None
    later.load_state_dict({"c": torch.ones(4)})
    assert third.value.tolist() == [1, 1, 1, 1]
    # Float64 and fp32 cross as they are.
    assert Residuals("int8").add(torch.zeros(3, dtype=torch.float64), {"a": slice(0, 3)}) is None
    assert Residuals().add(torch.zeros(3), {"a": slice(0, 3)}) is None
