"""A mixture of experts in one process, against one token after the other in float64."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from kaitian_mpi import Experts
from kaitian_mpi.distributed.experts import without_experts
from kaitian_mpi.errors import UserError

WIDTH = 6


class Scaled(nn.Module):
    """An expert that is unlike the others."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, tokens):
        return tokens * self.scale


def make(top_k=2, experts=4, dtype=torch.float64, **options):
    torch.manual_seed(0)
    modules = [
        nn.Sequential(nn.Linear(WIDTH, 3 + n), nn.Tanh(), nn.Linear(3 + n, WIDTH))
        for n in range(experts - 1)
    ]
    gate = nn.Linear(WIDTH, experts)
    return Experts([*modules, Scaled()], gate, top_k, **options).to(dtype)


def make_tokens(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, WIDTH, generator=generator).to(dtype).requires_grad_()


def by_token(mixture, tokens):
    """Return what a mixture computes, and how many tokens chose each expert, token by token."""
    rows, taken, total = [], [0] * len(mixture.experts), len(tokens)
    limit = math.inf
    if mixture.capacity_factor is not None:
        limit = math.ceil(mixture.capacity_factor * total * mixture.top_k / len(taken))
    for token in tokens:
        weights = mixture.gate(token).exp() / mixture.gate(token).exp().sum()
        chosen = sorted(range(len(taken)), key=lambda n: -weights[n].item())[: mixture.top_k]
        divisor = sum(weights[n] for n in chosen) if mixture.normalize else 1.0
        row = torch.zeros(WIDTH, dtype=token.dtype)
        for n in chosen:
            taken[n] += 1
            if taken[n] <= limit:
                row = row + weights[n] / divisor * mixture.experts[n](token[None])[0]
        rows.append(row)
    return torch.stack(rows), taken


OPTIONS = [
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 4},
    {"top_k": 1, "normalize": True},
    {"top_k": 2, "normalize": False},
    {"top_k": 1, "capacity_factor": 0.8},
    {"top_k": 2, "capacity_factor": 0.5},
    {"top_k": 2, "capacity_factor": 4.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_outputs_and_gradients_are_those_of_one_token_after_the_other(options):
    mixture, expected = make(**options), make(**options)
    tokens, alone = make_tokens(23), make_tokens(23)
    output = mixture(tokens)
    output.square().sum().backward()
    rows, taken = by_token(expected, alone)
    rows.square().sum().backward()
    torch.testing.assert_close(output, rows, rtol=1e-12, atol=1e-12)
    assert mixture.tokens_by_expert == taken
    torch.testing.assert_close(tokens.grad, alone.grad, rtol=1e-12, atol=1e-12)
    for parameter, other in zip(mixture.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (1,), (2, 5), (2, 1, 3)])
def test_tokens_may_have_any_leading_dimensions(shape):
    mixture, tokens = make(), make_tokens(*shape)
    output = mixture(tokens)
    assert output.shape == tokens.shape
    flat = by_token(mixture, tokens.reshape(-1, WIDTH))[0]
    torch.testing.assert_close(output.reshape(-1, WIDTH), flat, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
@pytest.mark.parametrize("options", [{}, {"capacity_factor": 1.0}])
def test_no_tokens_have_an_output_and_leave_no_gradient_in_the_experts(shape, options):
    mixture, tokens = make(**options), make_tokens(*shape)
    output = mixture(tokens)
    assert output.shape == tokens.shape
    (output.sum() + mixture.balance_loss).backward()
    assert mixture.balance_loss.item() == 0
    assert mixture.tokens_by_expert == [0] * 4
    assert all(p.grad is None for p in mixture.experts.parameters())
    assert all(not p.grad.any() for p in mixture.gate.parameters())


def test_experts_that_no_token_chose_get_no_gradient():
    mixture = make(top_k=1)
    with torch.no_grad():
        mixture.gate.bias.copy_(torch.tensor([0.0, 50.0, 0.0, 0.0]))
    mixture(make_tokens(8)).sum().backward()
    assert mixture.tokens_by_expert == [0, 8, 0, 0]
    chosen = [any(p.grad is not None for p in expert.parameters()) for expert in mixture.experts]
    assert chosen == [False, True, False, False]


def test_frozen_experts_pass_the_gradient_on():
    mixture, tokens = make(), make_tokens(9)
    mixture.experts.requires_grad_(False)
    mixture(tokens).sum().backward()
    assert all(p.grad is None for p in mixture.experts.parameters())
    assert tokens.grad.any()
    assert mixture.gate.weight.grad.any()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_other_dtypes_are_near_float64(dtype, tolerance):
    mixture = make(dtype=dtype)
    exact = copy.deepcopy(mixture).double()
    tokens = make_tokens(40, dtype=dtype)
    with torch.no_grad():  # choices between which rounding decides are no error of the sums
        scores = exact.gate(tokens.double()).sort(descending=True).values
        tokens = tokens[(scores[:, 1] - scores[:, 2]) > 0.05]
        output, expected = mixture(tokens), exact(tokens.double())
    assert output.dtype == dtype
    assert len(tokens) > 20
    assert mixture.tokens_by_expert == exact.tokens_by_expert
    assert (output.double() - expected).abs().max() < tolerance


def test_weights_are_those_of_float32_in_half_precision():
    mixture = make(dtype=torch.bfloat16)
    probabilities, weights, chosen = mixture.route(make_tokens(5, dtype=torch.bfloat16))
    assert probabilities.dtype == weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(5))
    assert chosen.shape == (5, 2)


def test_autocast_keeps_the_tokens_dtype_and_trains():
    mixture, tokens = make(dtype=torch.float32), make_tokens(12, dtype=torch.float32)
    expected = mixture(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = mixture(tokens)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, expected, rtol=0.05, atol=0.05)
    (output.sum() + mixture.balance_loss).backward()
    assert all(p.grad.dtype == torch.float32 for p in mixture.gate.parameters())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_computes_alone(copied):
    mixture, tokens = make(), make_tokens(7)
    output = mixture(tokens)
    mixture.use_exchange(Doubling())
    other = copied(mixture)
    with pytest.raises(UserError, match="requires a forward"):
        _ = other.balance_loss
    with torch.no_grad():  # it is not to be trained beside the model
        assert torch.equal(other(tokens), output)
    assert not torch.equal(mixture(tokens), output)
    assert mixture.balance_loss.requires_grad


def test_experts_that_are_left_out_return_the_tokens_and_have_no_values_in_a_copy():
    mixture, tokens = make(), make_tokens(7)
    mixture(tokens)
    counts = mixture.tokens_by_expert
    mixture.use_exchange(Doubling())
    with without_experts():
        output = mixture(tokens)
        copied = copy.deepcopy(mixture)
        optimizer = torch.optim.AdamW(copied.parameters())
        copied(tokens).sum().backward()
        optimizer.step()
    torch.testing.assert_close(output, tokens)  # the weights of a token add up to 1
    assert mixture.tokens_by_expert == copied.tokens_by_expert == counts
    assert sum(parameter.numel() for parameter in copied.experts.parameters()) == 0
    dimensions = [[p.dim() for p in module.parameters()] for module in (mixture, copied)]
    assert dimensions[0] == dimensions[1]
    assert copied.gate.weight.grad is not None
    assert mixture.gate.weight.grad is None
    mixture.use_exchange(None)
    assert not torch.equal(mixture(tokens), output)
    assert torch.equal(copy.deepcopy(mixture)(tokens), mixture(tokens))


class Doubling:
    """Stands in for ranks: two that have the same tokens."""

    def order(self, experts):
        return [2, 0, 3, 1]

    def places(self, experts):
        return torch.tensor([1, 3, 0, 2])

    def compute(self, experts, rows, counts, wanted):
        outputs = 2 * experts.compute(rows, counts, self.order(experts))
        return outputs, [2 * number for number in wanted], 1 / 14


def test_an_exchange_computes_the_experts_of_all_ranks():
    mixture, tokens = make(), make_tokens(7)
    output, loss, counts = mixture(tokens), mixture.balance_loss, mixture.tokens_by_expert
    mixture.use_exchange(Doubling())
    torch.testing.assert_close(mixture(tokens), 2 * output)
    assert mixture.tokens_by_expert == [2 * number for number in counts]
    torch.testing.assert_close(mixture.balance_loss, loss / 2)  # a rank's part
    mixture.use_exchange(None)
    assert torch.equal(mixture(tokens), output)


def test_the_state_dict_names_gate_and_experts():
    mixture = Experts([nn.Linear(WIDTH, WIDTH, bias=False) for _ in "ab"], nn.Linear(WIDTH, 2))
    names = ["experts.0.weight", "experts.1.weight", "gate.bias", "gate.weight"]
    assert sorted(mixture.state_dict()) == names


def test_a_model_around_it_is_compiled_and_computes_the_same():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), make(dtype=torch.float32), nn.Tanh())
    tokens = make_tokens(5, dtype=torch.float32)
    expected = model(tokens)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in "12":
        torch.testing.assert_close(compiled(tokens), expected)
    (compiled(tokens).sum() + model[1].balance_loss).backward()
    assert model[0].weight.grad.any()


def gradients(model, tokens, call):
    model.zero_grad()
    (call(model, tokens).square().sum() + model[1].balance_loss).backward()
    return [p.grad.clone() for p in model.parameters()]


def test_an_activation_checkpoint_around_it_changes_no_gradient():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), make(), nn.Linear(WIDTH, WIDTH)).double()
    expected = gradients(model, make_tokens(9), lambda model, tokens: model(tokens))
    recomputed = gradients(
        model, make_tokens(9), lambda m, t: checkpoint(m, t, use_reentrant=False)
    )
    for one, other in zip(recomputed, expected, strict=True):
        assert torch.equal(one, other)


def test_a_balancing_loss_that_would_teach_the_gate_nothing_is_refused():
    mixture, tokens = make(), make_tokens(9)
    checkpoint(mixture, tokens, use_reentrant=True)
    with pytest.raises(UserError, match="use_reentrant=False"):
        _ = mixture.balance_loss
    with torch.no_grad():
        assert float(mixture.balance_loss) > 0
    mixture.gate.requires_grad_(False)
    assert float(mixture.balance_loss) > 0
    evaluated = make().eval()
    with torch.no_grad():
        evaluated(tokens)
    assert float(evaluated.balance_loss) > 0


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("capacity_factor", [None, 0.5])
def test_the_balancing_loss_is_that_of_mixtral(top_k, capacity_factor):
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    mixture = make(top_k, dtype=torch.float32, capacity_factor=capacity_factor)
    tokens = make_tokens(50, dtype=torch.float32)
    mixture(tokens)
    expected = modeling.load_balancing_loss_func((mixture.gate(tokens),), 4, top_k)
    torch.testing.assert_close(mixture.balance_loss, expected)
    for gradient, other in zip(
        torch.autograd.grad(mixture.balance_loss, mixture.gate.parameters()),
        torch.autograd.grad(expected, mixture.gate.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(gradient, other)


def test_the_balancing_loss_is_that_of_switch():
    mixture, tokens = make(top_k=1), make_tokens(50)
    mixture(tokens)
    probabilities = mixture.gate(tokens).softmax(-1)
    fractions = [float((probabilities.argmax(-1) == n).double().mean()) for n in range(4)]
    expected = 4 * sum(f * p for f, p in zip(fractions, probabilities.mean(0), strict=True))
    torch.testing.assert_close(mixture.balance_loss, expected)


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_balancing_loss_is_top_k_where_all_experts_get_the_same(top_k):
    mixture = Experts([nn.Identity()] * 4, nn.Identity(), top_k)
    tokens = 30 * torch.stack([torch.eye(4).roll(k, 1) for k in range(top_k)]).sum(0)
    mixture.double()(tokens.double())
    assert float(mixture.balance_loss) == pytest.approx(top_k)


def test_tokens_without_values_are_spread_evenly():
    mixture = make()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = copy.deepcopy(mixture)
        for module in fake.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(mode.from_tensor(parameter.detach())))
        output = fake(torch.empty(5, WIDTH, dtype=torch.float64))
        assert output.shape == (5, WIDTH)
        assert fake.tokens_by_expert == [3, 3, 2, 2]
    on_meta = mixture.to("meta")
    assert on_meta(torch.empty(5, WIDTH, dtype=torch.float64, device="meta")).is_meta


class Bare(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, tokens):
        return self.output(tokens)


IDENTITIES = [nn.Identity(), nn.Identity()]


def test_experts_and_options_that_do_not_fit_are_refused():
    for experts, options, line in (
        ([], {}, "Experts: there are no experts; give at least 1"),
        (IDENTITIES, {"top_k": 3}, "Experts: top_k is 3, and there are 2 experts; give from 1 to"),
        (IDENTITIES, {"top_k": 0}, "Experts: top_k is 0, and"),
        (IDENTITIES, {"capacity_factor": 0.0}, "capacity_factor must be above 0, not 0.0"),
        (IDENTITIES, {"capacity_factor": math.nan}, "capacity_factor must be above 0, not nan"),
    ):
        with pytest.raises(UserError) as error:
            Experts(experts, nn.Linear(WIDTH, 2), **options)
        assert line in str(error.value)
        assert "\n" not in str(error.value)


def test_outputs_of_another_shape_are_refused():
    tokens = torch.randn(3, WIDTH)
    shorter, pair = Bare(lambda rows: rows[:, :2]), Bare(lambda rows: (rows, rows))
    of_two = nn.Linear(WIDTH, 2)
    for experts, gate, line in (
        (IDENTITIES, nn.Linear(WIDTH, 3), "the gate returned the shape [3, 3] for 3 tokens and 2"),
        (IDENTITIES, pair, "the gate returned a tuple for 3 tokens and 2 experts; it must return"),
        ([shorter] * 2, of_two, "expert 0 returned the shape [3, 2] for tokens of the shape [3, 6"),
        ([pair] * 2, of_two, "expert 0 returned a tuple for tokens of the shape [3, 6]; it must"),
    ):
        with pytest.raises(UserError) as error:
            Experts(experts, gate)(tokens)
        assert line in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="balance_loss requires a forward"):
        _ = make().balance_loss
