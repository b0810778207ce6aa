"""A small language model, and texts of different lengths."""

import random

import torch
from one_process import CLASSES, ROWS
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

ARGUMENTS = {
    "output_dir": "out", "per_device_train_batch_size": 8, "num_train_epochs": 2,
    "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0, "optim": "sgd",
    "logging_steps": 4, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
}  # fmt: skip
"""Of a Trainer whose steps `one_process.report` repeats."""


class Texts(torch.utils.data.Dataset):
    """Texts of random bytes, with their classes."""

    def __init__(self):
        numbers = random.Random(0)
        self.texts = [
            [numbers.randrange(1, 64) for _ in range(numbers.randrange(4, 24))] for _ in range(ROWS)
        ]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, row):
        text = torch.tensor(self.texts[row])
        return {"row": torch.tensor(row), "input_ids": text, "class": text[0] % CLASSES}


def collate(samples, classes=False):
    texts = [sample["input_ids"] for sample in samples]
    pad = torch.nn.utils.rnn.pad_sequence
    inputs = pad(texts, batch_first=True)
    labels = pad(texts, batch_first=True, padding_value=-100)
    if classes:
        labels = torch.stack([sample["class"] for sample in samples])
    rows = torch.stack([sample["row"] for sample in samples])
    return {
        "input_ids": inputs,
        "attention_mask": (inputs > 0).long(),
        "labels": labels,
        "rows": rows,
    }


def language_model(classes=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
        num_labels=CLASSES, pad_token_id=0,
    )  # fmt: skip
    kind = AutoModelForSequenceClassification if classes else AutoModelForCausalLM
    return kind.from_config(config).double()
