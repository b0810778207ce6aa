"""Hugging Face's Trainer: a causal language model, a classifier of sequences, or an own loss.

The own loss is TRL's: a sum divided by the labels of all ranks, while the model returns a mean.
Another is a mean over rows.
"""

import sys
from functools import partial

import torch
import torch.distributed as dist
from language import ARGUMENTS, Texts, collate, language_model
from one_process import report
from torch import nn
from transformers import Trainer, TrainingArguments

kind = sys.argv[1]
classes = kind == "classifier"
accumulated, workers = map(int, sys.argv[2:4])
data, own, recorded = Texts(), language_model(classes), []


class Recorder(Trainer):
    """Notes the rows of each micro-batch."""

    def training_step(self, model, inputs, *args, **kwargs):
        rows = inputs.pop("rows").tolist()
        recorded.append((int(self.state.epoch or 0), rows, self.accelerator.sync_gradients))
        return super().training_step(model, inputs, *args, **kwargs)

    def prediction_step(self, model, inputs, *args, **kwargs):
        inputs.pop("rows")
        return super().prediction_step(model, inputs, *args, **kwargs)


class OwnLoss(Recorder):
    """Computes its loss from the model's scores, whatever loss the model returns."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ranks = 1 if kind == "own_mean" else self.accelerator.num_processes
        return own_loss(model, inputs, num_items_in_batch) * ranks


def own_loss(model, inputs, items):
    scores, labels = model(**inputs).logits, inputs["labels"][:, 1:]
    losses = nn.functional.cross_entropy(scores[:, :-1].transpose(1, 2), labels, reduction="none")
    if kind == "own_mean":
        return (losses.sum(1) / labels.ne(-100).sum(1)).mean()
    return losses.sum() / items


callbacks = []
if "object" in sys.argv:
    from kaitian_mpi.integrations.huggingface import AdaptiveCallback

    callbacks = [AdaptiveCallback()]
trainer = (OwnLoss if kind.startswith("own") else Recorder)(
    model=own,
    args=TrainingArguments(
        **ARGUMENTS, gradient_accumulation_steps=accumulated, remove_unused_columns=False,
        dataloader_num_workers=workers,
    ),
    train_dataset=data,
    callbacks=callbacks,
    data_collator=partial(collate, classes=classes),
)  # fmt: skip
if classes:
    trainer.evaluate(torch.utils.data.Subset(data, range(19)))
ended = trainer.train()
assert ended.training_loss == ended.metrics["train_loss"]
# Older releases also count the labels of the first tokens, for which there is no loss.
first = 1 if getattr(trainer, "_loss_shifts_labels", False) else 0


def backward(model, batches):
    losses = []
    whole = [collate([data[row] for row in rows], classes) for rows in batches]
    items = sum(int(batch["labels"][:, first:].ne(-100).sum()) for batch in whole if not classes)
    for batch in whole:
        batch.pop("rows")
        if kind.startswith("own"):
            loss = own_loss(model, batch, items)
        else:
            count = {} if classes else {"num_items_in_batch": torch.tensor(items)}
            # The Trainer takes every model's loss for one that it has divided by the labels.
            loss = model(**batch, **count).loss * (dist.get_world_size() if classes else 1)
        loss.backward()
        losses.append(float(loss.detach()))
    return sum(losses)


logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
found = {"logged": logged, "train_loss": ended.metrics["train_loss"], "logging_steps": 4}
report(recorded, own, language_model(classes), backward, **found)
