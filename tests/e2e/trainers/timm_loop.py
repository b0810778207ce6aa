"""A loop of timm's pieces, in the form of its train.py, on images whose class is their row.

timm_loop.py FOLDER_WITH_TIMM
"""

import argparse

import numpy as np
import timm_on_cpu  # noqa: F401
import torch
from one_process import ROWS, report
from PIL import Image
from timm import utils
from timm.data import create_loader
from timm.loss import LabelSmoothingCrossEntropy
from timm.models import create_model
from timm.optim import create_optimizer_v2
from torch.nn.parallel import DistributedDataParallel

SIDE, EPOCHS, PER_RANK = 16, 2, 8


class Images(torch.utils.data.Dataset):
    """Random images; timm's loader sets how they are transformed."""

    transform = None

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        pixels = np.random.default_rng(row).integers(256, size=(SIDE, SIDE, 3), dtype=np.uint8)
        return self.transform(Image.fromarray(pixels)), row


def transformer():
    torch.manual_seed(0)
    shape = {"img_size": SIDE, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    return create_model("vit_tiny_patch16_224", num_classes=ROWS, **shape).double()


args = argparse.Namespace(device="cpu")
device = utils.init_distributed_device(args)
own, recorded, evaluated = transformer(), [], []
loading = {
    "input_size": (3, SIDE, SIDE), "batch_size": PER_RANK, "distributed": args.distributed,
    "device": device, "num_workers": 1, "img_dtype": torch.float64,
}  # fmt: skip
train, held_out = Images(), Images()
loader = create_loader(train, is_training=True, no_aug=True, **loading)
loader_of_held_out = create_loader(held_out, **loading)
loss_fn = LabelSmoothingCrossEntropy(smoothing=0.1)
optimizer = create_optimizer_v2(own, opt="momentum", lr=0.1, momentum=0.0, weight_decay=0.0)
smoothed = utils.ModelEmaV2(own, decay=0.9)
model = DistributedDataParallel(own, device_ids=[device])
losses = utils.AverageMeter()
for epoch in range(EPOCHS):
    loader.sampler.set_epoch(epoch)
    model.train()
    optimizer.zero_grad()
    for images, target in loader:
        recorded.append((epoch, target.tolist(), True))
        loss = loss_fn(model(images), target)
        loss.backward()
        optimizer.step()
        losses.update(loss.item(), len(images))
        optimizer.zero_grad()
        smoothed.update(own)
        utils.reduce_tensor(loss.detach(), args.world_size)
    utils.distribute_bn(model, args.world_size, reduce=True)
    model.eval()
    with torch.no_grad():
        evaluated.append([len(model(images)) for images, _ in loader_of_held_out])


def backward(model, batches):
    pixels = torch.stack([torch.as_tensor(train[row][0]) for row in batches[0]]).double()
    loss = loss_fn(model((pixels - loader.mean) / loader.std), torch.tensor(batches[0]))
    loss.backward()
    return float(loss.detach())


report(recorded, own, transformer(), backward, evaluated=evaluated)
