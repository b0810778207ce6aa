"""Data-parallel training on handwritten digits, with stock DDP and on mixed devices.

train_before.py is stock DDP with equal batches. own_loop.py measures the ranks, gives each the
batch size that fits its speed, and survives lost ranks; the gradient is that of the global batch.

    torchrun --nproc-per-node 2 examples/train_before.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    """Train for 10 epochs; rank 0 prints the result."""
    dist.init_process_group("gloo")
    device = torch.device("cpu")
    torch.manual_seed(0)

    pixels, digits = load_digits(return_X_y=True)
    inputs, labels = torch.tensor(pixels).float() / 16, torch.tensor(digits)
    train = TensorDataset(inputs[:1500], labels[:1500])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, sampler=sampler, batch_size=32)

    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        scheduler.step()

    if dist.get_rank() == 0:
        with torch.no_grad():
            found = network(inputs[1500:].to(device)).argmax(1).cpu()
        accuracy = (found == labels[1500:]).float().mean()
        print(f"loss {loss:.4f}, held-out accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
