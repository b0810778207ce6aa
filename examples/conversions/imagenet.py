"""Image classification in the shape of the usual ImageNet script: meters, checkpoints.

mpirun -np 2 python examples/conversions/imagenet.py
"""

import argparse
import time

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset

from kaitian_mpi import Task, Training, init

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=2048)
parser.add_argument("-j", "--workers", type=int, default=0)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("-b", "--batch-size", type=int, default=64, help="over all ranks")
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--weight-decay", type=float, default=1e-4)
parser.add_argument("-p", "--print-freq", type=int, default=10)
parser.add_argument("--resume", default="", metavar="PATH", help="or auto")
parser.add_argument("-e", "--evaluate", action="store_true")
parser.add_argument("--seed", type=int, default=0)


class Pictures(Dataset):
    """Pictures of noise, in which a bright square tells the class."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(self.seed + index)
        picture = torch.randn(3, 32, 32, generator=generator)
        row, column = divmod(index % 16, 4)
        picture[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 1
        return picture, index % 16


def make_model() -> nn.Module:
    """Return a small convolutional network."""
    layers = []
    for wide_in, wide_out in ((3, 16), (16, 32), (32, 64)):
        convolution = nn.Conv2d(wide_in, wide_out, 3, stride=2, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(wide_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 16))


def main():
    """Train and validate, epoch by epoch."""
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    args.rank = init().rank

    model = make_model()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)

    train_dataset = Pictures(args.samples, 0)
    val_dataset = Pictures(args.samples // 4, args.samples)
    task = Task(
        model=model,
        optimizer=optimizer,
        data=train_dataset,
        validation=val_dataset,
        metrics=validate,
        extra_state=scheduler,
    )
    with Training(
        task,
        global_batch_size=args.batch_size,
        epochs=args.epochs,
        workers=args.workers,
        run_dir="run",
        resume=args.resume,
    ) as training:
        if args.evaluate:
            training.evaluate()
            return
        for epoch in training.epochs():
            train(epoch, training, criterion, args)
            training.evaluate()
            scheduler.step()


def train(epoch, training, criterion, args):
    """Train for an epoch."""
    batch_time = AverageMeter("Time", ":6.3f")
    losses = AverageMeter("Loss", ":.4e")
    top1 = AverageMeter("Acc@1", ":6.2f")
    meters = [batch_time, losses, top1]
    progress = ProgressMeter(len(epoch), meters, f"Epoch: [{epoch.number}]")
    training.model.train()
    end = time.time()
    for i, (images, target) in enumerate(epoch):
        output = training.model(images)
        loss = criterion(output, target)
        (acc1,) = accuracy(output, target, topk=(1,))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1.item(), images.size(0))
        training.backward(loss)
        training.step()
        batch_time.update(time.time() - end)
        end = time.time()
        if i % args.print_freq == 0 and args.rank == 0:
            progress.display(i + 1)


def validate(model, batch):
    """Return the sums of the accuracies in percent."""
    images, target = batch
    output = model(images)
    acc1, acc5 = accuracy(output, target, topk=(1, 5))
    return {"Acc@1": acc1 * len(target), "Acc@5": acc5 * len(target)}


class AverageMeter:
    """Keeps a value and its average."""

    def __init__(self, name, fmt=":f"):
        self.name, self.fmt = name, fmt
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        """Add a value that is the mean over n samples."""
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        template = "{name} {val" + self.fmt + "} ({avg" + self.fmt + "})"
        return template.format(**self.__dict__)


class ProgressMeter:
    """Prints meters."""

    def __init__(self, num_batches, meters, prefix=""):
        self.num_batches, self.meters, self.prefix = num_batches, meters, prefix

    def display(self, batch):
        """Print the meters after a batch."""
        entries = [f"{self.prefix}[{batch}/{self.num_batches}]", *map(str, self.meters)]
        print("\t".join(entries))


def accuracy(output, target, topk=(1,)):
    """Return the percentages of the samples whose class is among the k most likely ones."""
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].flatten().float().sum(0) * 100 / target.size(0) for k in topk]


if __name__ == "__main__":
    main()
