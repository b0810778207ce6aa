"""Data-parallel training on handwritten digits, with stock DDP and on mixed devices.

train_before.py is stock DDP with equal batches. own_loop.py measures the ranks, gives each the
batch size that fits its speed, and survives lost ranks; the gradient is that of the global batch.

    kaitian-run -n 2 examples/own_loop.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import kaitian_mpi


def main() -> None:
    """Train for 10 epochs; rank 0 prints the result."""
    world = kaitian_mpi.init()
    device = world.device
    torch.manual_seed(0)

    pixels, digits = load_digits(return_X_y=True)
    inputs, labels = torch.tensor(pixels).float() / 16, torch.tensor(digits)
    train = TensorDataset(inputs[:1500], labels[:1500])

    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    task = kaitian_mpi.Task(model=network, optimizer=optimizer, data=train, extra_state=scheduler)
    training = kaitian_mpi.Training(task, global_batch_size=32 * world.size, epochs=10)
    for loader in training.epochs():
        for x, y in loader:
            loss = nn.functional.cross_entropy(training.model(x), y)
            training.backward(loss)
            training.step()
        scheduler.step()

    if dist.get_rank() == 0:
        with torch.no_grad():
            found = network(inputs[1500:].to(device)).argmax(1).cpu()
        accuracy = (found == labels[1500:]).float().mean()
        print(f"loss {loss:.4f}, held-out accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
