"""A LightningModule with a validation."""

import os
import sys

import lightning
import torch
from one_process import classifier, images, report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

inputs, labels = images()
recorded, evaluated = [], []


class Module(lightning.LightningModule):
    """Classifies, and notes the rows of each batch."""

    def __init__(self):
        super().__init__()
        self.net = classifier()

    def training_step(self, batch, _):
        recorded.append((self.current_epoch, batch[2].tolist(), True))
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        evaluated.append(len(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


strategy = "ddp"
if "object" in sys.argv:
    from kaitian_mpi.integrations.lightning import AdaptiveStrategy

    strategy = AdaptiveStrategy()
data = TensorDataset(inputs, labels, torch.arange(len(inputs)))
module = Module()
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    strategy=strategy,
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    precision=64,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    num_sanity_val_steps=1,
)
trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8))


def backward(model, batches):
    loss = nn.functional.cross_entropy(model(inputs[batches[0]]), labels[batches[0]])
    loss.backward()
    return float(loss.detach())


report(recorded, module.net, classifier(), backward, evaluated=evaluated)
