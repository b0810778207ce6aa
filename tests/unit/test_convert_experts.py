"""Hugging Face's mixtures with their experts as modules: the same numbers, and back."""

import copy
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from choices import by_default
from torch import nn

import kaitian_mpi
from kaitian_mpi import Experts, convert_experts, revert_experts
from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.convert_experts import SparseBlock

transformers = pytest.importorskip("transformers")

YEAR_OLD = os.environ.get("KAITIAN_TEST_YEAR_OLD")
SIZES = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
KINDS = {
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mixtral with jitter": ("mixtral", {"num_local_experts": 4, "router_jitter_noise": 0.1}),
    "qwen2_moe": ("qwen2_moe", {"num_experts": 4, "norm_topk_prob": False}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 5, "norm_topk_prob": True}),
    "qwen3_moe, some dense": (
        "qwen3_moe",
        {"num_experts": 5, "norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
}
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-12}


def make_model(kind, dtype=torch.float32, **settings):
    model_type, type_settings = KINDS[kind]
    config = transformers.AutoConfig.for_model(model_type, **SIZES | type_settings | settings)
    torch.manual_seed(3)
    grouped = {} if dtype == torch.float32 else {"experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **grouped)
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):  # else all experts would be equally likely
            nn.init.normal_(parameter)
    return model.to(dtype)


def make_ids():
    return torch.randint(3, 50, (3, 9), generator=torch.Generator().manual_seed(1))


def by_stacked_name(gradients):
    """Return gradients of a converted model by the names of transformers."""
    stacked, experts = {}, {}
    for name, gradient in gradients.items():
        block, is_expert, rest = name.partition(".experts.")
        if is_expert:
            number, matrix, _ = rest.split(".")
            experts.setdefault(block, {}).setdefault(int(number), {})[matrix] = gradient
        else:
            stacked[name] = gradient
    for block, members in experts.items():
        matrices = [members[number] for number in range(len(members))]
        names = (
            [("w1", "w3"), "w2"] if "w1" in matrices[0] else [("gate_proj", "up_proj"), "down_proj"]
        )
        first, last = names
        stacked[f"{block}.experts.gate_up_proj"] = torch.stack(
            [torch.cat([by_name[name] for name in first]) for by_name in matrices]
        )
        stacked[f"{block}.experts.down_proj"] = torch.stack([by_name[last] for by_name in matrices])
    return stacked


def compute(model, **options):
    """Return the output and the gradients of a step, with zeros for those that are None."""
    model.zero_grad()
    torch.manual_seed(5)
    ids = make_ids()
    output = model(input_ids=ids, labels=ids, **options)
    output.loss.backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    return output, gradients


@pytest.mark.parametrize("dtype", by_default(TOLERANCES, [torch.float32]), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_stay(kind, dtype):
    model, close = make_model(kind, dtype), {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    for options in ({}, {"output_router_logits": True}):
        model.train()
        expected, of_stacked = compute(model, **options)
        converted = convert_experts(copy.deepcopy(model))
        outputs, of_experts = compute(converted, **options)
        torch.testing.assert_close(outputs.loss, expected.loss, **close)
        torch.testing.assert_close(outputs.logits, expected.logits, **close)
        named = by_stacked_name(of_experts)
        assert named.keys() == of_stacked.keys()
        for name, gradient in of_stacked.items():
            torch.testing.assert_close(named[name], gradient, **close, msg=name)
        if options:
            torch.testing.assert_close(outputs.aux_loss, expected.aux_loss, **close)
            pairs = zip(outputs.router_logits, expected.router_logits, strict=True)
            for logits, expected_logits in pairs:
                torch.testing.assert_close(logits, expected_logits, **close)
    with torch.no_grad():
        one, other = model.eval()(make_ids()), converted.eval()(make_ids())
    torch.testing.assert_close(other.logits, one.logits, **close)


@pytest.mark.parametrize("kind", by_default(KINDS, ("mixtral", "qwen3_moe, some dense")))
def test_it_generates_the_same(kind):
    model = make_model(kind).eval()
    settings = {"max_new_tokens": 8, "do_sample": False, "num_beams": 2}
    expected = model.generate(make_ids(), **settings)
    assert torch.equal(convert_experts(model).generate(make_ids(), **settings), expected)


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe, some dense"])
def test_reverted_it_is_the_model_of_transformers(kind, tmp_path):
    model = make_model(kind)
    model.model.layers[0].mlp.experts.requires_grad_(False)
    expected = copy.deepcopy(model)
    assert convert_experts(model) is model
    assert convert_experts(model) is model  # nothing is left to convert
    assert not model.model.layers[0].mlp.experts[1].up.weight.requires_grad
    assert revert_experts(model) is model
    assert not any(isinstance(module, Experts) for module in model.modules())
    for (name, parameter), (other_name, other) in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert name == other_name
        assert torch.equal(parameter, other)
        assert parameter.requires_grad == other.requires_grad
    assert repr(model) == repr(expected)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for parameter, other in zip(loaded.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other)


@pytest.mark.parametrize(
    ("kind", "matrices"),
    [
        ("mixtral", ("w1", "w2", "w3")),
        ("qwen2_moe", ("gate_proj", "up_proj", "down_proj")),
        ("qwen3_moe", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_its_experts_have_the_names_of_published_checkpoints(kind, matrices):
    names = convert_experts(make_model(kind)).state_dict()
    for matrix in matrices:
        assert f"model.layers.2.mlp.experts.3.{matrix}.weight" in names
    assert "model.layers.2.mlp.gate.weight" in names
    assert not any("act_fn" in name for name in names)


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
def test_qwens_models_may_be_saved_as_they_are(kind, tmp_path):
    model = make_model(kind)
    expected = copy.deepcopy(model)
    convert_experts(model).save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for parameter, other in zip(loaded.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_no_more_than_one_block_is_in_memory_twice(monkeypatch):
    model = make_model("mixtral")
    stacked = [weakref.ref(layer.mlp.experts.gate_up_proj) for layer in model.model.layers]
    made = SparseBlock.__init__
    alive = []

    def count(self, block):
        alive.append(sum(reference() is not None for reference in stacked))
        made(self, block)

    monkeypatch.setattr(SparseBlock, "__init__", count)
    convert_experts(model)
    assert alive == [3, 2, 1]
    weights = list(model.parameters())
    for weight in weights:  # that no expert keeps the memory of others
        assert weight.untyped_storage().nbytes() == weight.nbytes
    experts = [weakref.ref(layer.mlp.experts[0]) for layer in model.model.layers]
    del weights, weight
    reverted, alive[:] = SparseBlock.reverted, []

    def count_reverted(self):
        alive.append(sum(reference() is not None for reference in experts))
        return reverted(self)

    monkeypatch.setattr(SparseBlock, "reverted", count_reverted)
    revert_experts(model)
    assert alive == [3, 2, 1]


def test_a_module_around_the_model_and_a_shared_block_are_converted():
    inner = make_model("qwen3_moe")
    inner.model.layers[2].mlp = inner.model.layers[0].mlp
    holder = nn.ModuleDict({"model": inner})
    assert convert_experts(holder) is holder
    assert inner.model.layers[2].mlp is inner.model.layers[0].mlp
    block = make_model("qwen3_moe").model.layers[0].mlp
    assert isinstance(convert_experts(block), Experts)


def test_the_balancing_loss_is_known_for_each_block():
    model = convert_experts(make_model("qwen2_moe"))
    model(make_ids())
    losses = [module.balance_loss for module in model.modules() if isinstance(module, Experts)]
    assert len(losses) == 3
    sum(losses).backward()
    assert all(layer.mlp.gate.weight.grad.any() for layer in model.model.layers)


def test_a_copy_of_a_converted_model_is_one():
    model = convert_experts(make_model("qwen2_moe", torch.float64))
    other = copy.deepcopy(model)
    assert torch.equal(other(make_ids()).logits, model(make_ids()).logits)
    assert not any(isinstance(module, Experts) for module in revert_experts(other).modules())


def refusal(call, model):
    with pytest.raises(UserError) as error:
        call(model)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_models_that_cannot_be_converted_are_refused():
    line = refusal(convert_experts, nn.Linear(2, 2))
    assert line == (
        "convert_experts: Linear has no block that can be converted: those of Mixtral, Qwen2-MoE "
        "and Qwen3-MoE of transformers 5 can"
    )
    config = transformers.AutoConfig.for_model("olmoe", **SIZES, num_experts=4)
    olmoe = transformers.AutoModelForCausalLM.from_config(config)
    assert refusal(convert_experts, olmoe).endswith("5 can; its OlmoeSparseMoeBlock is not")
    model = make_model("mixtral")
    block = model.model.layers[1].mlp
    handle = block.register_forward_hook(lambda *_: None)
    assert "has hooks; register them after" in refusal(convert_experts, model)
    handle.remove()
    block.experts._hf_hook = None
    assert "load it without device_map" in refusal(convert_experts, model)
    del block.experts._hf_hook
    block.experts._is_expert_parallel = True
    assert "load it without" in refusal(convert_experts, model)
    block.experts._is_expert_parallel = False
    block.experts.__class__ = type("FP8Experts", (type(block.experts),), {})
    line = refusal(convert_experts, model)
    assert line.startswith(
        "convert_experts: MixtralSparseMoeBlock cannot be converted: its experts"
    )
    assert "quantized" in line
    block.experts = nn.ModuleList([nn.Linear(2, 2)])
    assert "its experts are a ModuleList; use transformers 5" in refusal(convert_experts, model)
    assert not any(isinstance(module, Experts) for module in model.modules())  # all or none


def test_models_that_cannot_be_reverted_are_refused():
    model = make_model("mixtral")
    assert "no block that convert_experts has made" in refusal(revert_experts, model)
    block = convert_experts(model).model.layers[1].mlp
    block.use_exchange(object())
    assert "the experts are on several ranks" in refusal(revert_experts, model)
    block.use_exchange(None)
    block.experts[2].w1 = nn.Sequential(block.experts[2].w1)
    assert "expert 2 of a block is not as" in refusal(revert_experts, model)


@pytest.mark.thorough
@pytest.mark.skipif(not YEAR_OLD, reason="needs releases in the folder $KAITIAN_TEST_YEAR_OLD")
@pytest.mark.parametrize("some", ["gradients_stay", "test"])
def test_models_of_transformers_of_a_year_ago(some):
    if YEAR_OLD in sys.path[:1]:
        pytest.skip("this is it")
    places = [
        YEAR_OLD,
        str(Path(kaitian_mpi.__file__).parents[1]),
        os.environ.get("PYTHONPATH", ""),
    ]
    environment = os.environ | {"PYTHONPATH": ":".join(places)}
    environment.pop("KAITIAN_TEST_YEAR_OLD")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        some,
        __file__,
    ]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout
