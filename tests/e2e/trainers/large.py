"""Trains a model of many layers for some steps, by Hugging Face's Trainer or Lightning.

large.py hugging_face|lightning WIDTH LAYERS [meta]: prints the bytes of the parameters, and the
losses. With `meta`, rank 0 alone creates the model with its values.
"""

import contextlib
import os
import sys

import torch
from torch import nn

kind, width, layers = sys.argv[1], *map(int, sys.argv[2:4])
torch.manual_seed(0)


class Net(nn.Module):
    """Residual layers, with a loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x, labels):
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / layers
        return {"loss": (x - labels).square().mean()}


class Rows(torch.utils.data.Dataset):
    """Random inputs and labels."""

    def __len__(self):
        return 64

    def __getitem__(self, row):
        generator = torch.Generator().manual_seed(row)
        x, labels = torch.randn(2, width, generator=generator)
        return {"x": x, "labels": labels}


def hugging_face(model):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=4, max_steps=3, learning_rate=1e-3,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Rows())
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def lightning(model):
    from lightning import LightningModule
    from lightning import Trainer as LightningTrainer

    losses = []

    class Module(LightningModule):
        """The model, in Lightning."""

        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch, _):
            loss = self.net(**batch)["loss"]
            losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    trainer = LightningTrainer(
        max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, use_distributed_sampler=True, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(Rows(), batch_size=4))
    return losses


begins_on_meta = "meta" in sys.argv and os.environ["RANK"] != "0"
with torch.device("meta") if begins_on_meta else contextlib.nullcontext():
    model = Net()
losses = {"hugging_face": hugging_face, "lightning": lightning}[kind](model)
if os.environ["RANK"] == "0":
    size = sum(parameter.nbytes for parameter in model.parameters())
    print(f"LOSSES {size} {losses}", flush=True)
