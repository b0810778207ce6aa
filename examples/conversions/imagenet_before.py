"""Image classification in the shape of the usual ImageNet script: DDP, meters, checkpoints.

torchrun --nproc-per-node 2 examples/conversions/imagenet_before.py
"""

import argparse
import os
import shutil
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=2048)
parser.add_argument("-j", "--workers", type=int, default=0)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--start-epoch", type=int, default=0)
parser.add_argument("-b", "--batch-size", type=int, default=64, help="over all ranks")
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--weight-decay", type=float, default=1e-4)
parser.add_argument("-p", "--print-freq", type=int, default=10)
parser.add_argument("--resume", default="", metavar="PATH")
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
    args.distributed = "WORLD_SIZE" in os.environ
    if args.distributed:
        dist.init_process_group("gloo")
        args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
        args.batch_size = args.batch_size // args.world_size
    else:
        args.rank, args.world_size = 0, 1
    device = torch.device("cpu")

    model = make_model().to(device)
    if args.distributed:
        model = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)

    best_acc1 = 0.0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        args.start_epoch = checkpoint["epoch"]
        best_acc1 = checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        print(f"loaded checkpoint '{args.resume}' (epoch {checkpoint['epoch']})")

    train_dataset = Pictures(args.samples, 0)
    val_dataset = Pictures(args.samples // 4, args.samples)
    train_sampler = val_sampler = None
    if args.distributed:
        train_sampler = DistributedSampler(train_dataset)
        val_sampler = DistributedSampler(val_dataset, shuffle=False, drop_last=True)
    train_loader = DataLoader(
        train_dataset,
        batch_size=args.batch_size,
        shuffle=train_sampler is None,
        num_workers=args.workers,
        pin_memory=False,
        sampler=train_sampler,
    )
    val_loader = DataLoader(
        val_dataset,
        batch_size=args.batch_size,
        shuffle=False,
        num_workers=args.workers,
        pin_memory=False,
        sampler=val_sampler,
    )
    if args.evaluate:
        validate(val_loader, model, criterion, device, args)
        return

    for epoch in range(args.start_epoch, args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, device, args)
        acc1 = validate(val_loader, model, criterion, device, args)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if args.rank == 0:
            state = {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "best_acc1": best_acc1,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            save_checkpoint(state, is_best)
    if args.distributed:
        dist.destroy_process_group()


def train(train_loader, model, criterion, optimizer, epoch, device, args):
    """Train for an epoch."""
    batch_time = AverageMeter("Time", ":6.3f")
    losses = AverageMeter("Loss", ":.4e")
    top1 = AverageMeter("Acc@1", ":6.2f")
    progress = ProgressMeter(len(train_loader), [batch_time, losses, top1], f"Epoch: [{epoch}]")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        (acc1,) = accuracy(output, target, topk=(1,))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time.update(time.time() - end)
        end = time.time()
        if i % args.print_freq == 0:
            progress.display(i + 1)


def validate(val_loader, model, criterion, device, args):
    """Return the accuracy over the validation data."""
    batch_time = AverageMeter("Time", ":6.3f")
    losses = AverageMeter("Loss", ":.4e")
    top1 = AverageMeter("Acc@1", ":6.2f")
    top5 = AverageMeter("Acc@5", ":6.2f")
    progress = ProgressMeter(len(val_loader), [batch_time, losses, top1, top5], "Test: ")
    model.eval()
    with torch.no_grad():
        end = time.time()
        for i, (images, target) in enumerate(val_loader):
            images = images.to(device, non_blocking=True)
            target = target.to(device, non_blocking=True)
            output = model(images)
            loss = criterion(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            losses.update(loss.item(), images.size(0))
            top1.update(acc1.item(), images.size(0))
            top5.update(acc5.item(), images.size(0))
            batch_time.update(time.time() - end)
            end = time.time()
            if i % args.print_freq == 0:
                progress.display(i + 1)
    if args.distributed:
        top1.all_reduce(device)
        top5.all_reduce(device)
    print(f" * Acc@1 {top1.avg:.3f} Acc@5 {top5.avg:.3f}")
    return top1.avg


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    """Save a checkpoint, and a copy if it is the best."""
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


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

    def all_reduce(self, device):
        """Average over all ranks."""
        total = torch.tensor([self.sum, self.count], dtype=torch.float32, device=device)
        dist.all_reduce(total, dist.ReduceOp.SUM)
        self.sum, self.count = total.tolist()
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
