"""Files of weights to start from: which fit a model, and what is said of the others."""

import pytest
import torch
from torch import nn

from kaitian_mpi.errors import RankLostError, UserError
from kaitian_mpi.train import setup
from kaitian_mpi.train.weight_files import load_weights


class Language(nn.Module):
    """Has tied weights and buffers."""

    def __init__(self, words=5):
        super().__init__()
        self.embedding = nn.Embedding(words, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, words, bias=False)
        self.head.weight = self.embedding.weight


class Counting(Language):
    """Has extra state, which is no tensor."""

    def get_extra_state(self):
        return {"seen": 7}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def some():
    """Return other weights than those of a new model."""
    model = Language()
    with torch.no_grad():
        for number, value in enumerate(model.state_dict().values()):
            value.copy_(torch.arange(value.numel()).reshape(value.shape) + number)
    return model.state_dict()


def without(*names):
    return {name: value for name, value in some().items() if name not in names}


def changed(**values):
    state = some()
    return state | {name.replace("__", "."): change(state) for name, change in values.items()}


def with_prefix(prefix):
    return {prefix + name: value for name, value in some().items()}


FITTING = {
    "as saved": some,
    "one of two tied weights": lambda: without("embedding.weight"),
    "the other one": lambda: without("head.weight"),
    "of DDP": lambda: with_prefix("module."),
    "compiled": lambda: with_prefix("_orig_mod."),
    "compiled, of DDP": lambda: with_prefix("module._orig_mod."),
    "in a checkpoint": lambda: {"model": some(), "optimizers": [{}], "progress": {"step": 3}},
    "as in torch's tutorial": lambda: {"epoch": 3, "model_state_dict": some()},
    "bf16": lambda: {name: value.bfloat16() for name, value in some().items()
                     if value.is_floating_point()} | {"norm.num_batches_tracked":
                                                      some()["norm.num_batches_tracked"]},
    "not contiguous": lambda: changed(
        embedding__weight=lambda state: state["embedding.weight"].T.contiguous().T
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FITTING)
def test_weights_of_the_same_model_are_loaded(tmp_path, name):
    torch.save(FITTING[name](), tmp_path / "start.pt")
    model = Language()
    load_weights(model, str(tmp_path / "start.pt"))
    expected = some()
    for key, value in model.state_dict().items():
        assert value.tolist() == expected["head.weight" if "weight" in key and "norm" not in key
                                          else key].tolist()  # fmt: skip


@pytest.mark.parametrize("make", [Language, lambda: torch.compile(Language())])
def test_safetensors_are_loaded(tmp_path, make):
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'export'")
    original = Language()
    safetensors.save_model(original, str(tmp_path / "start.safetensors"))  # tied ones once
    model = make()
    load_weights(model, str(tmp_path / "start.safetensors"))
    found, expected = model.state_dict().values(), original.state_dict().values()
    assert all(map(torch.equal, found, expected))


def test_extra_state_may_be_missing_and_is_restored_where_it_is_not(tmp_path):
    path = str(tmp_path / "start.pt")
    torch.save(some(), path)  # as in this package's model.pt
    load_weights(Counting(), path)
    torch.save(Counting().state_dict(), path)
    model = Counting()
    load_weights(model, path)
    assert model.seen == 7


UNFIT = "the weights do not fit: .*"
WRONG = {
    "another head": (
        lambda: Language(7).state_dict(),
        f"{UNFIT}mismatch for embedding.weight",
    ),
    "another architecture": (
        lambda: nn.Linear(3, 3).state_dict(),
        f"{UNFIT}has no 'weight'.* lacks 'embedding.weight'.*; give weights of this very model",
    ),
    "both tied weights missing": (
        lambda: without("embedding.weight", "head.weight"),
        f"{UNFIT}the file lacks 'embedding.weight'; the file lacks 'head.weight'",
    ),
    "no tensor": (lambda: changed(norm__weight=lambda state: 3), f"{UNFIT}norm"),
    "sparse": (
        lambda: changed(norm__weight=lambda state: state["norm.weight"].to_sparse()),
        f"{UNFIT}norm.weight",
    ),
    "two models": (
        lambda: {"model": some(), "state_dict": some()},
        "it has no weights .it has both 'model' and 'state_dict'",
    ),
    "a whole module": (Language, "it has no weights .it holds more than tensors and plain"),
    "a list": (lambda: [torch.ones(1)], "it has no weights .it holds a list without tensors by"),
    "nothing": (dict, "it has no weights .it holds a dict without tensors by name"),
    "a name of two lines": (lambda: some() | {"a\nb": torch.ones(1)}, rf"{UNFIT}no 'a\\nb'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_content_is_a_one_line_error(tmp_path, name):
    make, message = WRONG[name]
    path = tmp_path / "start.pt"
    torch.save(make(), path)
    with pytest.raises(UserError, match=f"^--init {path}: {message}") as caught:
        load_weights(Language(), str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["start.pt", "start.safetensors"])
@pytest.mark.parametrize("damage", ["empty", "text", "cut", "changed", "of the other kind"])
def test_a_damaged_file_is_a_one_line_error(tmp_path, name, damage):
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'export'")
    path = tmp_path / name
    is_torch = path.suffix == ".pt"
    if is_torch != (damage == "of the other kind"):
        torch.save(some(), path)
    else:
        safetensors.save_model(Language(), str(path))
    content = path.read_bytes()
    # The first bytes describe what follows, in both formats.
    changed = content[:60] + b"x" * 60 + content[120:]
    path.write_bytes({"empty": b"", "text": b"text" * 99, "cut": content[: len(content) // 2],
                      "changed": changed, "of the other kind": content}[damage])  # fmt: skip
    with pytest.raises(UserError, match=f"^--init {path}: it has no weights") as caught:
        load_weights(Language(), str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["start.pt", "start.safetensors"])
def test_a_path_without_a_file_is_a_one_line_error(tmp_path, name):
    pytest.importorskip("safetensors.torch", reason="needs the extra 'export'")
    path = tmp_path / name
    for _ in range(2):
        with pytest.raises(
            UserError, match=f"^--init {path}: .*; name a file that can be"
        ) as error:
            load_weights(Language(), str(path))
        assert "\n" not in str(error.value)
        path.mkdir(exist_ok=True)


def test_a_rank_lost_while_the_first_weights_are_sent_leaves_each_ranks_own(monkeypatch):
    """Whoever follows rank 0 starts from them."""

    def leave_garbage(tensor, src):
        tensor.fill_(7)
        raise RankLostError("a rank is lost")

    monkeypatch.setattr(setup.dist, "broadcast", leave_garbage)
    model = Language()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RankLostError):
        setup.broadcast_model(model)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
