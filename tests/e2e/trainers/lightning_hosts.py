"""Lightning on hosts with unequal numbers of ranks, by Trainers with the arguments users give."""

import os

import lightning
import torch
import torch.distributed as dist
from one_process import classifier, images, report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
inputs, labels = images()
data = TensorDataset(inputs, labels, torch.arange(len(inputs)))
prepared = []


class Module(lightning.LightningModule):
    """Classifies, and notes the rows of each batch."""

    def __init__(self):
        super().__init__()
        self.net, self.rows = classifier(), []

    def prepare_data(self):
        prepared.append(rank)

    def training_step(self, batch, _):
        self.rows.append((self.current_epoch, batch[2].tolist(), True))
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def backward(model, batches):
    loss = nn.functional.cross_entropy(model(inputs[batches[0]]), labels[batches[0]])
    loss.backward()
    return float(loss.detach())


for arguments in ({}, {"devices": 2, "num_nodes": 2}, {"strategy": "ddp", "devices": 1}):
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=1, precision=64, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **arguments,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True))
    assert trainer.world_size == ranks
    assert trainer.global_rank == rank
    fabric = lightning.Fabric(devices=1, num_nodes=2)
    assert fabric.world_size == ranks
    report(module.rows, module.net, classifier(), backward)
gathered = [None] * ranks
dist.all_gather_object(gathered, prepared)
if rank == 0:
    print("prepared by", gathered)
alone = lightning.Trainer(devices=1, num_nodes=1, logger=False, enable_checkpointing=False)
assert alone.world_size == 1
