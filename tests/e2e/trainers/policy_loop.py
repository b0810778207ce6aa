"""A robot's policy trained through Accelerate, in the shape of `lerobot-train`.

Of its loop: batches are dicts, the policy's `forward` is called by its name and returns the loss
with figures, gradients are clipped through the accelerator, the script steps the scheduler, the
policy has an `update` after each step, the loader is cycled through, and its sampler draws the
order of each epoch from torch's generator.
"""

import copy

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from one_process import ROWS, report
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

BATCH, EPOCHS = 8, 2


class Frames(Dataset):
    """Frames of episodes: what is observed, and the actions of the next steps."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.state = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
        self.action = torch.randn(ROWS, 4, 6, generator=generator, dtype=torch.float64)

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        is_pad = torch.arange(4) >= 4 - row % 3
        state, action = self.state[row], self.action[row]
        return {"observation.state": state, "action": action, "action_is_pad": is_pad, "row": row}


class InOrderOfTorch(Sampler):
    def __len__(self):
        return ROWS

    def __iter__(self):
        yield from torch.randperm(ROWS).tolist()


class Policy(nn.Module):
    """Predicts a chunk of actions; some of its parameters are not used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 24)).double()
        self.unused = nn.Linear(2, 2).double()
        self.register_buffer("average", torch.zeros(24, dtype=torch.float64))

    def forward(self, batch):
        predicted = self.net(batch["observation.state"]).unflatten(1, (4, 6))
        errors = nn.functional.l1_loss(predicted, batch["action"], reduction="none")
        loss = (errors * ~batch["action_is_pad"].unsqueeze(-1)).mean()
        return loss, {"l1_loss": loss.item()}

    def update(self):
        self.average.mul_(0.9).add_(self.net[2].bias.detach(), alpha=0.1)


def cycle(loader):
    iterator = iter(loader)
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            iterator = iter(loader)


accelerator = Accelerator(
    step_scheduler_with_optimizer=False,
    kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    cpu=True,
)
data, own = Frames(), Policy()
start = copy.deepcopy(own)
torch.manual_seed(2)
groups = [{"params": own.net[0].parameters()}, {"params": [*own.net[2:].parameters()]}]
optimizer = torch.optim.SGD([*groups, {"params": own.unused.parameters()}], lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
loader = DataLoader(data, batch_size=BATCH, sampler=InOrderOfTorch(), drop_last=False)
accelerator.wait_for_everyone()
policy, optimizer, loader, scheduler = accelerator.prepare(own, optimizer, loader, scheduler)
batches = cycle(loader)
policy.train()
recorded, losses = [], []
for step in range(EPOCHS * len(loader)):
    batch = next(batches)
    with accelerator.autocast():
        loss, figures = policy.forward(batch)
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(policy.parameters(), 1e6)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    accelerator.unwrap_model(policy, keep_fp32_wrapper=True).update()
    losses.append((loss.item(), norm.item(), figures["l1_loss"]))
    recorded.append((step // len(loader), batch["row"].tolist(), True))
    accelerator.wait_for_everyone()
accelerator.wait_for_everyone()


def backward(model, micro_batches):
    (rows,) = micro_batches
    loss, _ = model(torch.utils.data.default_collate([data[row] for row in rows]))
    loss.backward()
    return loss.item()


report(recorded, own, start, backward, average=float(own.average.norm()))
