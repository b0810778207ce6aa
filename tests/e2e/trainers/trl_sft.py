"""TRL's SFTTrainer: supervised fine-tuning on prompts and completions."""

import sys

from datasets import Dataset
from language import ARGUMENTS, language_model
from one_process import report
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl_texts import TEXTS, TOKENIZER, words

loss_type = sys.argv[1]
own, recorded = language_model(), []


class Recorder(SFTTrainer):
    """Notes the rows of each micro-batch, found by their tokens."""

    def training_step(self, model, inputs, *args, **kwargs):
        masks = inputs["attention_mask"].bool()
        found = [ids[mask] for ids, mask in zip(inputs["input_ids"], masks, strict=True)]
        rows = [TEXTS.index(ids[:-1].tolist()) for ids in found]
        recorded.append((int(self.state.epoch or 0), rows, self.accelerator.sync_gradients))
        return super().training_step(model, inputs, *args, **kwargs)


trainer = Recorder(
    model=own,
    args=SFTConfig(
        **ARGUMENTS, gradient_accumulation_steps=2, use_cpu=True, bf16=False, loss_type=loss_type,
    ),
    train_dataset=Dataset.from_dict(
        {
            "prompt": [words(text[:2]) for text in TEXTS],
            "completion": [" " + words(text[2:]) for text in TEXTS],
        }
    ),
    processing_class=TOKENIZER,
)  # fmt: skip
ended = trainer.train()


def backward(model, batches):
    losses = []
    pad = DataCollatorForLanguageModeling(pad_token_id=0)
    whole = [pad([trainer.train_dataset[row] for row in rows]) for rows in batches]
    items = sum(int(batch["labels"][:, 1:].ne(-100).sum()) for batch in whole)
    for batch in whole:
        labels = batch.pop("labels")[:, 1:]
        log = model(**batch).logits[:, :-1].log_softmax(-1)
        log = log.gather(-1, labels.clamp(min=0)[..., None])[..., 0][labels.ne(-100)]
        weights = log.exp().detach() if loss_type == "dft" else 1
        loss = -(weights * log).sum() / items
        loss.backward()
        losses.append(float(loss.detach()))
    return sum(losses)


logged = [line for line in trainer.state.log_history if "num_tokens" in line]
report(
    recorded,
    own,
    language_model(),
    backward,
    train_loss=ended.metrics["train_loss"],
    tokens=(logged[-1]["num_tokens"], 2 * sum(len(text) + 1 for text in TEXTS)),  # each ends in one
)
