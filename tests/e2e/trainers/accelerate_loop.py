"""A loop over Accelerate, with accumulation: a classifier, or a language model of its own loss."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from language import Texts, collate, language_model
from one_process import classifier, images, report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

kind, *options = sys.argv[1:]
if kind == "object":
    from kaitian_mpi.integrations.accelerate import AdaptiveAccelerator as Accelerator
accelerator = Accelerator(
    gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(**dict.fromkeys(options, True)),
)
inputs, labels = images()
if kind == "language":
    data, start, merge = Texts(), language_model(), collate
else:
    data, start, merge = (
        TensorDataset(inputs, labels, torch.arange(len(inputs))),
        classifier(),
        None,
    )
module = language_model() if kind == "language" else classifier()
torch.manual_seed(2)
loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=merge)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
model, optimizer, loader, held_out = accelerator.prepare(
    module, optimizer, loader, DataLoader(data, batch_size=8, collate_fn=merge)
)


def loss_of(model, batch):
    if kind == "language":
        return model(**{name: value for name, value in batch.items() if name != "rows"}).loss
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


recorded, evaluated = [], []
for epoch in range(2):
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        rows = batch["rows"] if kind == "language" else batch[2]
        recorded.append((epoch, rows.tolist(), accelerator.sync_gradients))
    model.eval()
    with torch.no_grad():
        seen = []
        for batch in held_out:
            rows = batch["rows"] if kind == "language" else batch[2]
            seen += accelerator.gather_for_metrics(rows).tolist()
        evaluated.append(len(seen))


def backward(model, batches):
    losses = []
    for rows in batches:
        whole = collate([data[row] for row in rows]) if kind == "language" else data[rows]
        loss = loss_of(model, whole) / 2
        loss.backward()
        losses.append(float(loss.detach()))
    return sum(losses)


report(recorded, module, start, backward, evaluated=evaluated)
