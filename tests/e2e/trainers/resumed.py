"""Trainers that save checkpoints, and continue from the last one if they are started again.

resumed.py plain_ddp|accelerate|hugging_face|lightning KILLED_AT [workers] [object] [batch_norm]
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from one_process import RecordInFile, classifier, images, report
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

kind, killed_at, *options = sys.argv[1:]
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
record = RecordInFile(rank, int(killed_at))
inputs, labels = images()
data = TensorDataset(inputs, labels, torch.arange(len(inputs)))
EPOCHS, PER_RANK, EVERY = 2, 8, 4
PER_EPOCH = -(-len(data) // (PER_RANK * ranks))
evaluated, logged, repeated = [], {}, []
NORM = nn.BatchNorm1d if "batch_norm" in options else nn.Identity


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def plain_ddp():
    dist.init_process_group("gloo")
    module = nn.SyncBatchNorm.convert_sync_batchnorm(classifier(NORM))
    done = 0
    if os.path.exists("last.pt"):
        saved = torch.load("last.pt", weights_only=True)
        module.load_state_dict(saved["model"])
        done = saved["steps"]
    # With a device, as timm gives one.
    model = nn.parallel.DistributedDataParallel(module, device_ids=[torch.device("cpu")])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data, seed=1)
    workers = 2 if "workers" in options else 0
    loader = DataLoader(data, batch_size=PER_RANK, sampler=sampler, num_workers=workers)
    held_out = DataLoader(data, PER_RANK, sampler=DistributedSampler(data, shuffle=False))
    for epoch in range(done // PER_EPOCH, EPOCHS):
        sampler.set_epoch(epoch)
        for index, batch in enumerate(loader, epoch * PER_EPOCH):
            if index < done:
                continue
            record.note(index, epoch, batch[2].tolist(), True)
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            if rank == 0 and index % EVERY == 0:
                torch.save({"model": module.state_dict(), "steps": index + 1}, "last.tmp")
                os.replace("last.tmp", "last.pt")
        model.eval()
        with torch.no_grad():
            evaluated.append([len(model(batch[0])) for batch in held_out])
        model.train()
    return module


def accelerate():
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    # Else the order of the rows in an epoch is another one after a resume.
    loading = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    module = classifier()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    torch.manual_seed(2)
    loader = DataLoader(data, batch_size=PER_RANK, shuffle=True)
    model, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    done = 0
    if saved := sorted(Path("saved").glob("*"), key=lambda path: int(path.name)):
        accelerator.load_state(str(saved[-1]))
        done = int(saved[-1].name)
    for epoch in range(done // PER_EPOCH, EPOCHS):
        skipped = max(0, done - epoch * PER_EPOCH)
        left = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        left.set_epoch(epoch)  # before Accelerate 1.15, a loader that skips is at epoch 0
        for index, batch in enumerate(left, epoch * PER_EPOCH + skipped):
            record.note(index, epoch, batch[2].tolist(), True)
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if index % EVERY == 0:
                accelerator.save_state(f"unfinished/{index + 1}")
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:  # so what a kill leaves unfinished is not resumed
                    os.renames(f"unfinished/{index + 1}", f"saved/{index + 1}")
    return module


class Named(Dataset):
    """The same rows, as the Trainer takes them."""

    def __len__(self):
        return len(data)

    def __getitem__(self, row):
        return {"x": inputs[row], "labels": labels[row], "row": row}


class WithLoss(nn.Module):
    """A classifier that returns its loss."""

    def __init__(self):
        super().__init__()
        self.net = classifier()

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def hugging_face():
    from transformers import Trainer, TrainingArguments

    class Recorder(Trainer):
        """Notes the rows of each micro-batch."""

        def training_step(self, model, inputs, *args, **kwargs):
            rows = inputs.pop("row").tolist()
            record.note(self.state.global_step, self.state.global_step // PER_EPOCH, rows, True)
            return super().training_step(model, inputs, *args, **kwargs)

    arguments = {
        "output_dir": "out", "per_device_train_batch_size": PER_RANK, "num_train_epochs": EPOCHS,
        "save_steps": EVERY, "learning_rate": 0.1, "lr_scheduler_type": "constant",
        "max_grad_norm": 0, "optim": "sgd", "report_to": [], "remove_unused_columns": False,
        "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    module = WithLoss()
    trainer = Recorder(module, TrainingArguments(**arguments), train_dataset=Named())
    # The last file of a checkpoint: a rank may be lost while rank 0 writes one.
    complete = [path.parent for path in Path("out").glob("checkpoint-*/trainer_state.json")]
    last = max(complete, key=lambda path: int(path.name.split("-")[1]), default=None)
    trainer.train(resume_from_checkpoint=last and str(last))
    return module.net


def lightning():
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        """Classifies, and notes the rows of each batch."""

        def __init__(self):
            super().__init__()
            self.net = classifier()

        def prepare_data(self):
            """One rank prepares, and the others wait for it, as in most scripts."""

        def training_step(self, batch, _):
            record.note(self.global_step, self.current_epoch, batch[2].tolist(), True)
            loss = loss_of(self.net, batch)
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch, _):
            evaluated.append(len(batch[0]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module, strategy, held_out = Module(), "auto", None
    if "object" in options:
        from kaitian_mpi.integrations.lightning import AdaptiveStrategy

        strategy, held_out = AdaptiveStrategy(), DataLoader(data, batch_size=PER_RANK)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", strategy=strategy, precision=64,
        logger=False, callbacks=[ModelCheckpoint("saved", save_last=True)],
        enable_progress_bar=False, num_sanity_val_steps=1,
    )  # fmt: skip
    loader = DataLoader(data, batch_size=PER_RANK, shuffle=True)
    trainer.fit(module, loader, held_out, ckpt_path="last")
    logged["loss"] = float(trainer.callback_metrics["loss"])
    return module.net


def backward(model, batches):
    loss = loss_of(model, data[batches[0]])
    loss.backward()
    repeated.append([float(loss.detach()), len(batches[0])])
    return repeated[-1][0]


trained = {each.__name__: each for each in (plain_ddp, accelerate, hugging_face, lightning)}[kind]()
found = {"evaluated": evaluated, "repeated": repeated, **logged}
report(record.read(), trained, classifier(NORM), backward, **found)
