"""Lets mixtures of experts of Hugging Face's transformers train with `--layout experts`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from kaitian_mpi.distributed.experts import Experts
from kaitian_mpi.errors import UserError


@dataclass(frozen=True)
class _Family:
    """How published checkpoints name the three matrices of an expert."""

    gate: str
    up: str
    down: str


_QWEN = _Family("gate_proj", "up_proj", "down_proj")
_FAMILIES = {
    "MixtralSparseMoeBlock": _Family("w1", "w3", "w2"),
    "Qwen2MoeSparseMoeBlock": _QWEN,
    "Qwen3MoeSparseMoeBlock": _QWEN,
}
"""By the name of the sparse block's class in transformers."""


def convert_experts(model: nn.Module) -> nn.Module:
    """Convert the sparse blocks of a Hugging Face model to `Experts`, whose experts are modules.

    The model computes what it did before, in training, evaluation and generation; router logits and
    their auxiliary loss, which is that of each rank's own tokens, are returned as before. Routers,
    shared experts and all else stay. The weights are moved, one block at a time; gradients are not.
    Convert before an optimizer or an adapter is made. Not collective.

    The experts' parameters have the names of published checkpoints, as
    `model.layers.0.mlp.experts.3.up_proj.weight`. `revert_experts` makes it the model of
    transformers again.

    Args:
        model: of transformers 5 or later, of the families Mixtral, Qwen2-MoE or Qwen3-MoE, or a
            module that contains one; changed in place.

    Returns:
        The model.

    Raises:
        UserError: it has no sparse block of these families, or one that is quantized, divided over
            devices or has an adapter.
    """
    if not any(_is_stacked(module) or _is_converted(module) for module in model.modules()):
        others = {type(module).__name__ for module in model.modules() if hasattr(module, "experts")}
        others_text = f"; its {', '.join(sorted(others))} is not" if others else ""
        raise UserError(
            f"convert_experts: {type(model).__name__} has no block that can be converted: those of "
            f"Mixtral, Qwen2-MoE and Qwen3-MoE of transformers 5 can{others_text}"
        )
    return _replace(model, _is_stacked, _check, SparseBlock)


def revert_experts(model: nn.Module) -> nn.Module:
    """Convert what `convert_experts` has made to the blocks of transformers again. Not collective.

    So it can be saved by `save_pretrained` and published. After a training with `--layout experts`,
    load a checkpoint, which has all experts, into a converted model in one process.

    Args:
        model: changed in place.

    Returns:
        The model.

    Raises:
        UserError: an expert is on another rank, or is not as it was made, as with an adapter.
    """
    if not any(_is_converted(module) for module in model.modules()):
        raise UserError(
            f"revert_experts: {type(model).__name__} has no block that convert_experts has made"
        )
    return _replace(model, _is_converted, SparseBlock.check_whole, SparseBlock.reverted)


class SparseBlock(Experts):
    """A sparse block of a model of transformers, with that model's own router as its gate.

    A shared expert, which all tokens go through, is dense.
    """

    shared_expert: nn.Module
    shared_expert_gate: nn.Module

    def __init__(self, block: Any) -> None:
        """Make it from a block of transformers, whose weights are copied once."""
        gate = block.gate
        stacked = block.experts
        family = _FAMILIES[type(block).__name__]
        experts = [
            SparseExpert(family, gate_up, down, stacked.act_fn)
            for gate_up, down in zip(stacked.gate_up_proj, stacked.down_proj, strict=True)
        ]
        normalize = bool(getattr(gate, "norm_topk_prob", True))
        super().__init__(experts, gate, gate.top_k, normalize=normalize)
        self.experts.requires_grad_(stacked.gate_up_proj.requires_grad)
        for expert in experts:
            expert.down.requires_grad_(stacked.down_proj.requires_grad)
        self.has_shared_expert = hasattr(block, "shared_expert")
        if self.has_shared_expert:
            self.shared_expert = block.shared_expert
            self.shared_expert_gate = block.shared_expert_gate
        self._jitter = float(getattr(block, "jitter_noise", 0.0))
        self._records_probabilities = _records_probabilities(gate)
        self._block_class = type(block)
        self._config = stacked.config
        self.train(block.training)

    def route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the router's own choice; its hooks record the logits that the model returns."""
        recorded, weights, chosen = self.gate(tokens)
        probabilities = recorded if self._records_probabilities else recorded.float().softmax(-1)
        return probabilities, weights, chosen

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the block's output, shaped as the tokens: (batch, sequence, width)."""
        if self.training and self._jitter > 0:
            tokens = tokens * torch.empty_like(tokens).uniform_(1 - self._jitter, 1 + self._jitter)
        output: torch.Tensor = super().forward(tokens)
        if self.has_shared_expert:
            weights = self.shared_expert_gate(tokens).sigmoid()
            output = output + weights * self.shared_expert(tokens)
        return output

    def check_whole(self) -> None:
        """Check that the experts are here, and as they were made.

        Raises:
            UserError: they are not.
        """
        if self._exchange is not None:
            raise UserError(
                "revert_experts: the experts are on several ranks; load a checkpoint into a "
                "converted model in one process, and revert that"
            )
        for number, expert in enumerate(self.experts):
            if not isinstance(expert, SparseExpert) or not expert.is_as_made():
                raise UserError(
                    f"revert_experts: expert {number} of a block is not as convert_experts made "
                    "it; merge or remove adapters first"
                )

    def reverted(self) -> nn.Module:
        """Return the block of transformers with these weights, which are copied once."""
        with torch.device("meta"):
            block: Any = self._block_class(self._config)
        block.gate = self.gate
        if self.has_shared_expert:
            block.shared_expert = self.shared_expert
            block.shared_expert_gate = self.shared_expert_gate
        experts: list[Any] = list(self.experts)
        block.experts.gate_up_proj = _stack(
            [(expert.gate.weight, expert.up.weight) for expert in experts]
        )
        block.experts.down_proj = _stack([(expert.down.weight,) for expert in experts])
        block.train(self.training)
        return block  # type: ignore[no-any-return]


class SparseExpert(nn.Module):
    """One expert of Mixtral's and Qwen's form: down(act(gate(tokens)) * up(tokens))."""

    def __init__(
        self, family: _Family, gate_up: torch.Tensor, down: torch.Tensor, act_fn: nn.Module
    ) -> None:
        """Copy an expert's weights.

        Args:
            family: the names of its matrices.
            gate_up: shaped (2 x inner width, width).
            down: shaped (width, inner width).
            act_fn: the activation function; shared by all experts.
        """
        super().__init__()
        self.family = family
        gate, up = gate_up.chunk(2)
        for name, weight in ((family.gate, gate), (family.up, up), (family.down, down)):
            setattr(self, name, _linear(weight))
        self.act_fn = act_fn

    @property
    def gate(self) -> nn.Module:
        """The matrix before the activation function."""
        return self.get_submodule(self.family.gate)

    @property
    def up(self) -> nn.Module:
        """The matrix whose output is multiplied by the activations."""
        return self.get_submodule(self.family.up)

    @property
    def down(self) -> nn.Module:
        """The matrix back to the model's width."""
        return self.get_submodule(self.family.down)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the expert's output, shaped as the tokens: (tokens, width)."""
        output: torch.Tensor = self.down(self.act_fn(self.gate(tokens)) * self.up(tokens))
        return output

    def is_as_made(self) -> bool:
        """Return whether its matrices are those of plain linear layers."""
        matrices = (self.gate, self.up, self.down)
        return all(type(linear) is nn.Linear and _is_plain(linear.weight) for linear in matrices)


def _is_stacked(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ in _FAMILIES and kind.__module__.startswith("transformers.models.")


def _is_converted(module: nn.Module) -> bool:
    return isinstance(module, SparseBlock)


def _check(block: Any) -> None:
    """Check that the block is as transformers makes it."""
    experts = block.experts
    name = type(block).__name__
    reason = ""
    if not hasattr(experts, "gate_up_proj") or not hasattr(experts, "config"):
        reason = f"its experts are a {type(experts).__name__}; use transformers 5 or later"
    elif type(experts).__name__ != name.replace("SparseMoeBlock", "Experts") or not all(
        _is_plain(weight) for weight in (experts.gate_up_proj, experts.down_proj)
    ):
        reason = (
            f"its experts are a {type(experts).__name__} of "
            f"{type(getattr(experts, 'gate_up_proj', None)).__name__}; convert before they are "
            "quantized, sharded or get an adapter"
        )
    elif getattr(experts, "_is_expert_parallel", False):
        reason = "it is divided by transformers' expert parallelism; load it without"
    elif any(hasattr(module, "_hf_hook") for module in block.modules()):
        reason = "it is divided over devices; load it without device_map"
    elif any(module._forward_hooks or module._forward_pre_hooks for module in (block, experts)):
        reason = "it has hooks; register them after it is converted"
    if reason:
        raise UserError(f"convert_experts: {name} cannot be converted: {reason}")


def _is_plain(weight: Any) -> bool:
    return type(weight) is nn.Parameter and type(weight.data) is torch.Tensor


def _linear(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone())
    return layer


def _stack(experts: list[tuple[torch.Tensor, ...]]) -> nn.Parameter:
    """Return a parameter with the rows of an expert's matrices one after the other."""
    rows = sum(len(matrix) for matrix in experts[0])
    stacked = experts[0][0].new_empty(len(experts), rows, experts[0][0].shape[1])
    with torch.no_grad():
        for target, matrices in zip(stacked, experts, strict=True):
            torch.cat(matrices, out=target)
    is_trained = any(matrix.requires_grad for matrices in experts for matrix in matrices)
    return nn.Parameter(stacked, is_trained)


def _records_probabilities(router: Any) -> bool:
    """Return whether a router returns probabilities first, as in transformers 5.0, and not logits.

    Of weights of 0, logits are 0.
    """
    with torch.no_grad():
        weight = torch.zeros(router.weight.shape)
        logits = functional_call(router, {"weight": weight}, torch.ones(1, weight.shape[1]))[0]
    return bool(logits.any())


def _replace(
    model: nn.Module,
    is_wanted: Callable[[nn.Module], bool],
    check: Callable[[Any], None],
    make: Callable[[Any], nn.Module],
) -> nn.Module:
    """Check all modules that are wanted, then replace each; return the model."""
    for module in model.modules():
        if is_wanted(module):
            check(module)
    if is_wanted(model):
        return make(model)
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None and is_wanted(child):
                places.setdefault(id(child), []).append((parent, name))
    # Nothing here refers to a module that is replaced, so that its memory is free for the next.
    for shared in places.values():
        parent, name = shared[0]
        replacement = make(getattr(parent, name))
        for parent, name in shared:
            setattr(parent, name, replacement)
    return model
