"""A mixture of experts, in one process, or with its experts held by different ranks."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.abort import install_abort_hook

_left_out_contexts = 0
"""How many `without_experts` are open."""

_exchanging: weakref.WeakSet[Experts] = weakref.WeakSet()
"""The mixtures of this process whose experts are held by different ranks."""


@contextmanager
def without_experts() -> Iterator[None]:
    """Skip the experts of every `Experts` in this process, inside the block. Not collective.

    An expert's output is then its input, and a copy of the module has no values of experts. For a
    forward on one rank alone that measures the rest of the model.
    """
    global _left_out_contexts
    _left_out_contexts += 1
    try:
        yield
    finally:
        _left_out_contexts -= 1


def are_experts_left_out() -> bool:
    """Return whether the caller is inside `without_experts`."""
    return _left_out_contexts > 0


class ExpertExchange(Protocol):
    """Computes experts of which each rank holds some."""

    def order(self, experts: Experts) -> list[int]:
        """Return a mixture's experts in the order in which `compute` takes their rows."""

    def places(self, experts: Experts) -> torch.Tensor:
        """Return each expert's index in `order`: [experts] in int64, on this rank's device."""

    def compute(
        self, experts: Experts, rows: torch.Tensor, counts: Sequence[int], wanted: Sequence[int]
    ) -> tuple[torch.Tensor, Sequence[int], float]:
        """Return the experts' outputs for this rank's rows. Collective.

        Args:
            experts: the mixture.
            rows: shaped (rows, width), on this rank's device, sorted by expert as in `order`.
            counts: the number of rows of each expert, in that order.
            wanted: these numbers before the capacity's limit.

        Returns:
            The outputs, shaped as the rows are; the sum of all ranks' `wanted`; and a factor for a
            sum over this rank's tokens, by which the ranks' weighted losses add up to a mean over
            all ranks' tokens.
        """


class Experts(nn.Module):
    """A mixture of experts: a token's output is the weighted sum of those that a gate chooses.

    With `--layout experts`, each expert is on one rank, and every rank's tokens are sent to it;
    otherwise this process has all experts. No token is dropped, unless `capacity_factor` is given.
    An expert that no token has chosen gets no gradient.

    Dropout inside an expert draws from the random numbers of the rank that holds it.
    """

    def __init__(
        self,
        experts: Sequence[nn.Module],
        gate: nn.Module,
        top_k: int = 2,
        *,
        normalize: bool | None = None,
        capacity_factor: float | None = None,
    ) -> None:
        """Make a mixture of these experts.

        Args:
            experts: each maps (tokens, width) to (tokens, width), for one token or more; they may
                differ from each other.
            gate: maps (tokens, width) to a score for each expert, shaped (tokens, experts). The
                softmax of a token's scores gives the weights of the experts' outputs.
            top_k: how many experts a token goes through: those with the largest weights.
            normalize: whether these weights are divided by their sum, as in Mixtral. None: if
                `top_k` is above 1; a single weight is kept (as in Switch), because the gate would
                have no gradient if it were always 1.
            capacity_factor: limits how many of the tokens that a rank computes at once an expert
                takes: this factor times an equal share. Further tokens skip this expert. None: no
                limit.

        Raises:
            UserError: there are no experts, or fewer than `top_k`; or an argument is out of range.
        """
        super().__init__()
        install_abort_hook()  # a script may make its model before it calls `init`
        self.experts = nn.ModuleList(experts)
        self.gate = gate
        self.top_k = top_k
        self.normalize = top_k > 1 if normalize is None else normalize
        self.capacity_factor = capacity_factor
        if not self.experts:
            raise UserError("Experts: there are no experts; give at least 1")
        if not 1 <= top_k <= len(self.experts):
            raise UserError(
                f"Experts: top_k is {top_k}, and there are {len(self.experts)} experts; give from "
                "1 to their number"
            )
        if capacity_factor is not None and not capacity_factor > 0:
            raise UserError(f"Experts: capacity_factor must be above 0, not {capacity_factor}")
        self._exchange: ExpertExchange | None = None
        self._balance_loss: torch.Tensor | None = None
        self.tokens_by_expert: list[int] = [0] * len(self.experts)
        """How many tokens, of all ranks, chose each expert in the last forward."""

    def __getstate__(self) -> dict[str, Any]:
        # A copied or pickled module computes all experts itself, and has no graph of a loss.
        return self.__dict__ | {"_exchange": None, "_balance_loss": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Experts:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        if are_experts_left_out():
            for parameter in self.experts.parameters():
                memo.setdefault(id(parameter), _without_values(parameter))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    @property
    def balance_loss(self) -> torch.Tensor:
        """The balancing loss of the last forward, shaped (); `top_k` if all experts get the same.

        It is the Switch Transformer's (arXiv 2101.03961, equation 4), with all `top_k` choices
        counted as in Mixtral: the number of experts, times the sum over experts of the fraction of
        tokens that chose the expert times the mean of its probability. Add it to the loss, times
        0.01 for example. It is computed over the tokens that all ranks compute together: one
        micro-batch of each. Choices that a `capacity_factor` drops count.

        Raises:
            UserError: there was no forward yet; or the last one, in training, was without
                gradients, as inside a reentrant activation checkpoint: the gate would learn nothing
                from this loss.
        """
        loss = self._balance_loss
        if loss is None:
            raise UserError("Experts: balance_loss requires a forward; call the module first")
        needs_gradient = self.training and torch.is_grad_enabled()
        if needs_gradient and not loss.requires_grad and self._has_trained_gate():
            raise UserError(
                "Experts: balance_loss has no gradient, as the last forward was computed without; "
                "if it is in an activation checkpoint, give that use_reentrant=False"
            )
        return loss

    def _has_trained_gate(self) -> bool:
        return any(parameter.requires_grad for parameter in self.gate.parameters())

    def use_exchange(self, exchange: ExpertExchange | None) -> None:
        """Compute the experts with other ranks from now on, or all of them here."""
        self._exchange = exchange
        if exchange is None:
            _exchanging.discard(self)
        else:
            _exchanging.add(self)

    def _check_in_model(self) -> None:
        """Refuse to train experts of which every rank would have a copy of its own."""
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            raise UserError(
                "Experts: these are not part of Task.model, whose experts are on different ranks "
                "(--layout experts), so no rank would train them; make them a part of the model"
            )

    @not_compiled
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the chosen experts' outputs for each token.

        Collective if the experts are held by different ranks.

        Args:
            tokens: shaped (..., width), of any floating-point dtype; there may be none.

        Returns:
            A tensor of the tokens' shape and dtype.

        Raises:
            UserError: the gate or an expert returns a tensor of another shape; or these experts are
                not part of the model whose experts are held by different ranks.
        """
        width = tokens.shape[-1]
        expert_count = len(self.experts)
        flat_tokens = tokens.reshape(-1, width)
        token_count = len(flat_tokens)
        probabilities, weights, chosen = self.route(flat_tokens)
        skips_experts = are_experts_left_out()
        exchange = None if skips_experts else self._exchange
        if exchange is None and _exchanging and not skips_experts:
            self._check_in_model()

        # A choice is a pair of a token and one of its experts. Sort the choices by expert.
        expert_of_choice = chosen.reshape(-1)
        if exchange is not None:
            expert_of_choice = exchange.places(self)[expert_of_choice]
        order = expert_of_choice.argsort(stable=True)
        wanted: Sequence[int] = _choices_by_expert(expert_of_choice, expert_count)
        counts = wanted
        if self.capacity_factor is not None:
            limit = math.ceil(self.capacity_factor * token_count * self.top_k / expert_count)
            order = _first_of_each(order, counts, limit)
            counts = [min(count, limit) for count in counts]

        repeated = flat_tokens.unsqueeze(1).expand(token_count, self.top_k, width)
        repeated = repeated.reshape(-1, width)  # a row for each choice
        rows = repeated[order]
        if exchange is None:
            outputs = rows if skips_experts else self.compute(rows, counts)
            scale = 1.0 / max(1, token_count)
        else:
            outputs, wanted, scale = exchange.compute(self, rows, counts, wanted)
            by_expert = dict(zip(exchange.order(self), wanted, strict=True))
            wanted = [by_expert[expert] for expert in range(expert_count)]
        self.tokens_by_expert = list(wanted)
        self._balance_loss = self._balance(probabilities, wanted, scale)

        weighted = outputs * weights.reshape(-1)[order].unsqueeze(1)
        # Back in the tokens' order. The indices are unique, so the sums are the same each time.
        by_choice = torch.zeros_like(repeated, dtype=weighted.dtype)
        by_choice.index_put_((order,), weighted)
        result = by_choice.view(token_count, self.top_k, width).sum(1)
        return result.to(tokens.dtype).reshape(tokens.shape)

    def route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return which experts each token goes through. Not collective.

        Args:
            tokens: shaped (tokens, width).

        Returns:
            The probabilities of all experts, shaped (tokens, experts); the weights of the chosen
            ones, shaped (tokens, top_k); and their indices, shaped as the weights are, in int64.

        Raises:
            UserError: the gate does not return a score for each expert.
        """
        scores = self.gate(tokens)
        shape = [len(tokens), len(self.experts)]
        if not isinstance(scores, torch.Tensor) or list(scores.shape) != shape:
            raise UserError(
                f"Experts: the gate returned {_in_words(scores)} for {shape[0]} tokens and "
                f"{shape[1]} experts; it must return a score for each expert, of the shape {shape}"
            )
        # In half precision, weights of many experts would be rounded to few values.
        exact = scores if scores.dtype == torch.float64 else scores.float()
        probabilities = exact.softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return probabilities, weights, chosen

    def compute(
        self,
        rows: torch.Tensor,
        counts: Sequence[int],
        experts: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return the outputs of experts on this rank. Not collective.

        Args:
            rows: shaped (rows, width), sorted by expert.
            counts: the number of rows of each of these experts.
            experts: their indices; None: all.

        Returns:
            The outputs, of the rows' shape and dtype.

        Raises:
            UserError: an expert returns another shape.
        """
        indices = range(len(self.experts)) if experts is None else experts
        parts = zip(indices, rows.split(list(counts)), strict=True)
        outputs = [self.compute_one(index, part) for index, part in parts if len(part)]
        return torch.cat(outputs) if outputs else rows

    def compute_one(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the output of one expert on this rank, in the dtype of its rows."""
        output = self.experts[index](rows)
        if not isinstance(output, torch.Tensor) or output.shape != rows.shape:
            raise UserError(
                f"Experts: expert {index} returned {_in_words(output)} for tokens of the shape "
                f"{list(rows.shape)}; it must return a tensor of the same shape"
            )
        return output.to(rows.dtype)

    def _balance(
        self, probabilities: torch.Tensor, by_expert: Sequence[int], scale: float
    ) -> torch.Tensor:
        """Return the balancing loss; `by_expert` are the numbers of tokens that chose each."""
        total = sum(by_expert)
        fractions = probabilities.new_tensor(by_expert) * (self.top_k / max(1, total))
        return len(self.experts) * (fractions * probabilities.sum(0)).sum() * scale


def _choices_by_expert(expert_of_choice: torch.Tensor, experts: int) -> list[int]:
    """Return the number of choices of each expert; equal numbers if the tensor has no values."""
    if expert_of_choice.is_meta or isinstance(expert_of_choice, FakeTensor):  # to estimate memory
        quotient, remainder = divmod(len(expert_of_choice), experts)
        return [quotient + (index < remainder) for index in range(experts)]
    counts: list[int] = expert_of_choice.bincount(minlength=experts).tolist()
    return counts


def _in_words(output: object) -> str:
    """Describe what a module has returned, for an error message."""
    if isinstance(output, torch.Tensor):
        return f"the shape {list(output.shape)}"
    return f"a {type(output).__name__}"


def _first_of_each(order: torch.Tensor, counts: Sequence[int], limit: int) -> torch.Tensor:
    """Return at most `limit` choices of each expert, the first ones, in the experts' order."""
    parts = order.split(list(counts))
    return torch.cat([part[:limit] for part in parts])


def _without_values(parameter: nn.Parameter) -> nn.Parameter:
    """Return an empty parameter with as many dimensions: some optimizers depend on their number."""
    empty = parameter.detach().new_empty([0] * parameter.dim() if parameter.dim() else [0])
    return nn.Parameter(empty, parameter.requires_grad)
