"""A loop of plain PyTorch, as of its examples; its script knows nothing of adaptive batches."""

import sys

import torch
import torch.distributed as dist
from one_process import classifier, images, report
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
inputs, labels = images()
data = TensorDataset(inputs, labels, torch.arange(len(inputs)))
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=int(sys.argv[1]))
held_out = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
own = classifier()
model = DistributedDataParallel(own, device_ids=[torch.device("cpu")])  # as timm says it
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recorded, evaluated = [], []
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y, rows in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        recorded.append((epoch, rows.tolist(), True))
    model.eval()
    with torch.no_grad():
        evaluated.append([len(model(x)) for x, _, _ in held_out])
    model.train()


def backward(model, batches):
    loss = nn.functional.cross_entropy(model(inputs[batches[0]]), labels[batches[0]])
    loss.backward()
    return float(loss.detach())


report(recorded, own, classifier(), backward, evaluated=evaluated)
