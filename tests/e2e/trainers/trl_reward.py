"""TRL's RewardTrainer: it logs the means of the ranks' means, gathered."""

import torch
from datasets import Dataset
from language import ARGUMENTS, language_model
from one_process import report
from torch.nn.functional import logsigmoid
from trl import RewardConfig, RewardTrainer
from trl_texts import TEXTS, TOKENIZER, words


def reward_model():
    model = language_model(classes=True)
    model.score = torch.nn.Linear(16, 1, bias=False, dtype=torch.float64)
    torch.nn.init.ones_(model.score.weight)
    model.config.num_labels = 1
    model.num_labels = 1
    return model


own, recorded = reward_model(), []


class Recorder(RewardTrainer):
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
    args=RewardConfig(**ARGUMENTS, use_cpu=True, bf16=False),
    train_dataset=Dataset.from_dict(
        {
            "prompt": [words(text[:2]) for text in TEXTS],
            "chosen": [" " + words(text[2:]) for text in TEXTS],
            "rejected": [" " + words(text[:1:-1]) for text in TEXTS],
        }
    ),
    processing_class=TOKENIZER,
)
trainer.train()
margins, accuracies = [], []


def backward(model, batches):
    (rows,) = batches
    batch = trainer.data_collator([trainer.train_dataset[row] for row in rows])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    chosen, rejected = model(**inputs).logits.squeeze(-1).chunk(2)
    margins.append(float((chosen - rejected).mean()))
    accuracies.append(float((chosen > rejected).double().mean()))
    loss = -logsigmoid(chosen - rejected).mean()
    loss.backward()
    return float(loss.detach())


logged = [log for log in trainer.state.log_history if "margin" in log]
report(
    recorded,
    own,
    reward_model(),
    backward,
    margins=margins,
    accuracies=accuracies,
    logged=[(log["step"], log["margin"], log["accuracy"]) for log in logged],
)
