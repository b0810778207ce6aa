"""TRL's DPOTrainer: it gathers rewards by row, and its model returns another loss than it has."""

import torch
from datasets import Dataset
from language import ARGUMENTS, language_model
from one_process import report
from torch.nn.functional import logsigmoid
from trl import DPOConfig, DPOTrainer
from trl_texts import TEXTS, TOKENIZER, words

BETA = 0.5
own, reference, recorded = language_model(), language_model(), []


class Recorder(DPOTrainer):
    """Notes the rows of each batch, found by the tokens of what was chosen."""

    def training_step(self, model, inputs, *args, **kwargs):
        pairs = len(inputs["input_ids"]) // 2
        masks = inputs["attention_mask"].bool()[:pairs]
        found = [ids[mask] for ids, mask in zip(inputs["input_ids"], masks, strict=False)]
        rows = [TEXTS.index(ids[:-1].tolist()) for ids in found]
        recorded.append((int(self.state.epoch or 0), rows, self.accelerator.sync_gradients))
        return super().training_step(model, inputs, *args, **kwargs)


trainer = Recorder(
    model=own,
    ref_model=reference,
    args=DPOConfig(**ARGUMENTS, use_cpu=True, bf16=False, beta=BETA),
    train_dataset=Dataset.from_dict(
        {
            "prompt": [words(text[:2]) for text in TEXTS],
            "chosen": [" " + words(text[2:]) for text in TEXTS],
            "rejected": [" " + words(text[:1:-1]) for text in TEXTS],
        }
    ),
    processing_class=TOKENIZER,
)
ended = trainer.train()


def preferences(model, batch):
    """Return how much likelier what was chosen is than what was rejected, of each pair."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    words = batch["input_ids"][:, 1:, None]
    logs = logits[:, :-1].log_softmax(-1).gather(-1, words)[..., 0]
    chosen, rejected = (logs * batch["completion_mask"][:, 1:]).sum(1).chunk(2)
    return chosen - rejected


def backward(model, batches):
    (rows,) = batches
    batch = trainer.data_collator([trainer.train_dataset[row] for row in rows])
    with torch.no_grad():
        expected = preferences(reference, batch)
    loss = -logsigmoid(BETA * (preferences(model, batch) - expected)).mean()
    loss.backward()
    return float(loss.detach())


report(recorded, own, language_model(), backward, train_loss=ended.metrics["train_loss"])
