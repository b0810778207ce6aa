"""Layout pipeline divides models of transformers by their plan."""

import copy
import itertools
from importlib.util import find_spec

import pytest
import torch
from choices import by_default
from test_pipeline import LOSS, Run, compare_with_one_process, plan_of
from torch import nn
from torch.utils.data import TensorDataset

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.run_folder import NoFolder
from kaitian_mpi.train.layouts.pipeline.measure import find_facts
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.task import Task

if find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

pytestmark = pytest.mark.sizes(3)

SAMPLES, STEPS = 54, 4  # more than an epoch, whose last batch is a small one

SIZES = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
}  # fmt: skip


def make_model(kind, **settings):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | settings))


def in_float64(model):
    """Let it compute nothing in float32, as its norms do otherwise."""
    for module in [*model.modules()]:
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape, child.variance_epsilon)
                setattr(module, name, norm)
    return model.double()


def tokens():
    """Return samples of tokens, some of them with padding on the left, and their masks."""
    ids = torch.randint(3, 50, (SAMPLES, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(9) >= torch.arange(SAMPLES).remainder(4)[:, None]
    return TensorDataset(torch.where(mask, ids, 0), mask.long())


def loss_of(model, batch):
    ids, mask = batch
    logits = model(input_ids=ids, attention_mask=mask).logits
    return LOSS(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def its_own_loss(model, batch):
    ids, mask = batch
    return model(input_ids=ids, attention_mask=mask, labels=ids).loss


def make_task(model, loss=loss_of, **parts):
    optimizer = lambda m: torch.optim.AdamW(  # noqa: E731
        (p for p in m.parameters() if p.requires_grad), lr=0.01
    )
    return Task(model=model, optimizer=optimizer, data=tokens(), loss=loss, clip_norm=0.5, **parts)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "is_tied", "replicas"),  # by `--all`, each two of them in every combination
    [
        ("llama", True, 2),
        ("qwen3", True, 1),
        ("llama", False, 1),
        ("qwen3", False, 2),
    ],
)
def test_steps_are_those_of_one_process(world, tmp_path, kind, is_tied, replicas):
    task = make_task(in_float64(make_model(kind, tie_word_embeddings=is_tied)))
    check(world, task, tmp_path, replicas)


@pytest.mark.parametrize("what", by_default(["lora", "windows", "checkpointing"], ["windows"]))
def test_other_forms_of_models_are_divided(world, tmp_path, what):
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    kind, settings = ("qwen2", windows) if what == "windows" else ("mistral", {})
    model = in_float64(make_model(kind, **settings))
    if what == "checkpointing":
        model.gradient_checkpointing_enable()
    if what == "lora":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False)).double()
    check(world, make_task(model), tmp_path, 1)


def check(world, task, tmp_path, replicas):
    config = TrainConfig(layout="pipeline", balance="off", global_batch_size=24)
    find_facts(config, Setup(task, NoFolder()), world, takes_alike=True)
    initial = copy.deepcopy(task.model)
    run, taken = Run(world, task, plan_of(world, task, 5, replicas)), []
    while len(taken) < STEPS:
        taken += [one for _, one in itertools.islice(run.epoch(), STEPS - len(taken))]
        run.state.progress.epoch_done(9)
    run.close()
    compare_with_one_process(run, initial, taken, tmp_path)


def test_the_loss_may_be_the_models_own(world, tmp_path):
    model = make_model("mistral")
    task = make_task(model, its_own_loss, validation=tokens())
    expected = float(its_own_loss(copy.deepcopy(model).eval(), tokens()[:]))
    run = Run(world, task, plan_of(world, task, SAMPLES))
    found = run.loop.evaluate()
    step, _ = next(run.epoch())
    run.close()
    assert found == {"loss": pytest.approx(expected, rel=1e-3)}
    assert 0 < step.loss < 5


def routed():
    return make_model("qwen3_moe", output_router_logits=True)


def without_plan():
    model = make_model("llama")
    model.config.base_model_pp_plan = None
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (routed, "the layers fail .*.* let it return nothing of several layers, such as router"),
        (without_plan, "with a base_model_pp_plan"),
    ],
)
def test_a_model_that_its_plan_does_not_divide_is_refused(world, make, message):
    setup = Setup(make_task(make(), its_own_loss), NoFolder())
    with pytest.raises(UserError, match=message):
        find_facts(TrainConfig(layout="pipeline", balance="off"), setup, world)
