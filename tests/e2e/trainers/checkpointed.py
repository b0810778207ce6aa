"""Hugging Face's Trainer with AdamW, clipping, a schedule, an evaluation and checkpoints.

checkpointed.py FOLDER BATCH [CHECKPOINT]: the weights are in FOLDER/final at its end.
"""

import random
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

folder, batch, *checkpoint = sys.argv[1:]


class Texts(torch.utils.data.Dataset):
    """Texts of random bytes."""

    def __init__(self, count, seed):
        numbers = random.Random(seed)
        self.texts = [[numbers.randrange(1, 64) for _ in range(16)] for _ in range(count)]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, row):
        return {name: torch.tensor(self.texts[row]) for name in ("input_ids", "labels")}


torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
        tie_word_embeddings=True, pad_token_id=0,
    )
).double()  # fmt: skip
arguments = TrainingArguments(
    output_dir=folder, per_device_train_batch_size=int(batch), max_steps=6, learning_rate=3e-3,
    lr_scheduler_type="cosine", warmup_steps=2, weight_decay=0.1, logging_steps=1, save_steps=1,
    eval_strategy="steps", eval_steps=3, report_to=[], disable_tqdm=True, use_cpu=True, seed=1,
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=Texts(120, 0), eval_dataset=Texts(12, 5))
trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
trainer.save_model(f"{folder}/final")
