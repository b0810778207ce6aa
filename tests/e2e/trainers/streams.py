"""Trainers on streams: parts of one, or one that every rank reads, or rank 0 for all.

streams.py lightning|hugging_face|dispatched
"""

import itertools
import os
import sys

import torch
from one_process import classifier, images, report
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

(kind,) = sys.argv[1:]
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
inputs, labels = images()
STEPS, recorded = 20, []


class Rows(IterableDataset):
    """Yields rows again and again, or once."""

    def __init__(self, rows, is_endless):
        self.rows, self.is_endless = rows, is_endless

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        rows = self.rows if info is None else self.rows[info.id :: info.num_workers]
        rows = itertools.cycle(rows) if self.is_endless else rows
        return ({"x": inputs[row], "labels": labels[row], "row": row} for row in rows)


class WithLoss(nn.Module):
    """A classifier that returns its loss."""

    def __init__(self):
        super().__init__()
        self.net = classifier()

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}


def lightning():
    import lightning

    class Module(lightning.LightningModule):
        """Notes the rows of each batch; `batch_idx` is its second argument."""

        def __init__(self):
            super().__init__()
            self.model = WithLoss()

        def training_step(self, batch, _):
            recorded.append((self.current_epoch, batch.pop("row").tolist(), True))
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    part = Rows(range(rank, len(labels), ranks), is_endless=True)
    trainer = lightning.Trainer(
        max_steps=STEPS, precision=64, logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(part, batch_size=8, num_workers=rank + 1))
    return module.model.net


def hugging_face():
    from transformers import Trainer, TrainingArguments

    class Recorder(Trainer):
        """Notes the rows of each micro-batch."""

        def training_step(self, model, inputs, *args, **kwargs):
            rows = inputs.pop("row").tolist()
            recorded.append((self.state.global_step // 13, rows, True))
            return super().training_step(model, inputs, *args, **kwargs)

    own = WithLoss()
    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=8, max_steps=26, learning_rate=0.1,
        lr_scheduler_type="constant", max_grad_norm=0, optim="sgd", report_to=[], save_steps=99,
        remove_unused_columns=False, disable_tqdm=True, use_cpu=True,
        accelerator_config={"dispatch_batches": kind == "dispatched"},
    )  # fmt: skip
    Recorder(own, arguments, train_dataset=Rows(range(len(labels)), is_endless=False)).train()
    return own.net


def backward(model, batches):
    loss = nn.functional.cross_entropy(model(inputs[batches[0]]), labels[batches[0]])
    loss.backward()
    return float(loss.detach())


trained = lightning() if kind == "lightning" else hugging_face()
report(recorded, trained, classifier(), backward)
