"""The language model that benchmarks train, to predict random tokens."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class GPT(nn.Module):
    """A causal transformer."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [n, length, vocabulary] of tokens [n, length]."""
        return self.head(self.layers(self.tokens(x), mask=self.mask, is_causal=True))


class Embeddings(nn.Module):
    """Embeds tokens and their positions: the first layer of a model that is a chain of layers."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, length, width] of tokens [n, length]."""
        return self.tokens(x) + self.positions.weight


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of predicting each next token of [n, length + 1]."""
    logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)
