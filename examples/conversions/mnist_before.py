"""Handwritten digits in the shape of the usual MNIST script: a train and a test loop.

python examples/conversions/mnist_before.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc1, self.fc2 = nn.Linear(128, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the log of the probabilities of the 10 digits, for x shaped (batch, 1, 8, 8)."""
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        x = torch.flatten(functional.max_pool2d(x, 2), 1)
        x = self.fc2(functional.relu(self.fc1(self.dropout(x))))
        return functional.log_softmax(x, dim=1)


def train(args, model, device, loader, optimizer, epoch):
    """Train for an epoch."""
    model.train()
    for number, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = functional.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if number % args.log_interval == 0:
            print(f"epoch {epoch} batch {number}/{len(loader)} loss {loss.item():.6f}")


def test(model, device, loader):
    """Print the mean loss and the accuracy."""
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            loss += functional.nll_loss(output, target, reduction="sum").item()
            correct += (output.argmax(1) == target).sum().item()
    count = len(loader.dataset)
    print(f"test: loss {loss / count:.4f}, accuracy {correct / count:.3f}")


def main():
    """Train and test, epoch by epoch, then save the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--test-batch-size", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--save-model", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")

    pixels, digits = load_digits(return_X_y=True)
    inputs, labels = torch.tensor(pixels).float().view(-1, 1, 8, 8) / 16, torch.tensor(digits)
    train_data = TensorDataset(inputs[:1500], labels[:1500])
    test_data = TensorDataset(inputs[1500:], labels[1500:])
    train_loader = DataLoader(train_data, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_data, batch_size=args.test_batch_size)

    model = Net().to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()
    if args.save_model:
        torch.save(model.state_dict(), "mnist_cnn.pt")


if __name__ == "__main__":
    main()
