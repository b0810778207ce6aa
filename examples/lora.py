"""LoRA fine-tuning of a causal language model: transformers, peft, and texts of unlike lengths.

    mpirun -np 2 python examples/lora.py

The base model is tiny and has random weights, so that nothing is downloaded; in its place,
`AutoModelForCausalLM.from_pretrained` gives a real one. Only the answers count, not the questions
and not the padding: with `weight`, the gradient is exactly that of the mean over all the tokens of
answers in the global batch. Only the gradients of LoRA's matrices are sent between ranks.
"""

import argparse
import math

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, LlamaConfig

import kaitian_mpi

PADDING, IGNORED = 0, -100  # transformers leaves labels of -100 out of the loss
Batch = dict[str, torch.Tensor]


def make_model() -> nn.Module:
    """Return a frozen model with LoRA's matrices, which are trained, beside its linear layers."""
    config = LlamaConfig(
        vocab_size=256,  # the bytes of a text are its tokens
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,  # beside smaller random weights, LoRA's have little effect
    )
    model = AutoModelForCausalLM.from_config(config)
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
    return get_peft_model(model, lora)


def make_sample(number: int) -> Batch:
    """Return the tokens of a sum, such as `7+35=42.`, and those of its answer as labels."""
    draws = torch.Generator().manual_seed(number)
    one, other = (int(torch.randint(10**power, (1,), generator=draws)) for power in (1, 3))
    question, answer = f"{one}+{other}=".encode(), f"{one + other}.".encode()
    ids = torch.tensor([*question, *answer])
    return {"input_ids": ids, "labels": torch.tensor([IGNORED] * len(question) + [*answer])}


def collate(samples: list[Batch]) -> Batch:
    """Pad to the length of the longest."""
    ids = pad_sequence([one["input_ids"] for one in samples], True, PADDING)
    labels = pad_sequence([one["labels"] for one in samples], True, IGNORED)
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long(), "labels": labels}


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of the answers' tokens."""
    return model(**batch).loss


def count_tokens(batch: Batch) -> torch.Tensor:
    """Return how many tokens that mean is over; nothing predicts the first one."""
    return (batch["labels"][:, 1:] != IGNORED).sum()


def measure(model: nn.Module, batch: Batch) -> dict[str, tuple]:
    """Return the sum of the cross-entropy, and over how many tokens it is."""
    count = count_tokens(batch)
    return {"cross-entropy": (loss_of(model, batch) * count, count)}


def main() -> None:
    """Train the adapter; rank 0 prints the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--run-dir", default="", help="folder for checkpoints and results")
    options = parser.parse_args()

    world = kaitian_mpi.init()
    torch.manual_seed(0)
    task = kaitian_mpi.Task(
        model=make_model(),
        optimizer=lambda model: torch.optim.AdamW(
            (one for one in model.parameters() if one.requires_grad), lr=5e-3
        ),
        clip_norm=1.0,
        data=[make_sample(number) for number in range(1024)],
        collate=collate,
        loss=loss_of,
        weight=count_tokens,
        validation=[make_sample(number) for number in range(1024, 1280)],
        metrics=measure,
    )
    settings = {"global_batch_size": 32, "epochs": options.epochs, "run_dir": options.run_dir}
    with kaitian_mpi.Training(task, **settings) as training:
        for step in training:
            if world.rank == 0 and step.number % 16 == 1:
                print(f"step {step.number} loss {step.loss:.4f} samples {step.batch_sizes}")
        perplexity = math.exp(training.evaluate()["cross-entropy"])
    if world.rank == 0:
        trained, total = training.model.get_nb_trainable_parameters()
        print(f"trained {trained} of {total} parameters, held-out perplexity {perplexity:.2f}")


if __name__ == "__main__":
    main()
