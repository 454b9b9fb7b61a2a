"""transformers: Trainer for BERT with padding by a collator and load_best_model_at_end."""

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(0)


def rows(count):
    made = []
    for _ in range(count):
        ids = torch.randint(5, 200, (int(torch.randint(8, 24, ())),))
        made.append({"input_ids": ids, "labels": int(ids[0] > 100)})
    return made


def collate(features):
    ids = [f["input_ids"] for f in features]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    labels = torch.tensor([f["labels"] for f in features])
    return {"input_ids": padded, "attention_mask": (padded > 0).long(), "labels": labels}


config = BertConfig(vocab_size=200, hidden_size=128, num_hidden_layers=2, num_attention_heads=4)
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=16,
    max_steps=18,
    eval_strategy="steps",
    eval_steps=6,
    save_steps=6,
    save_total_limit=2,
    load_best_model_at_end=True,
    metric_for_best_model="accuracy",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(
    BertForSequenceClassification(config),
    arguments,
    data_collator=collate,
    train_dataset=rows(160),
    eval_dataset=rows(48),
    compute_metrics=lambda p: {"accuracy": float(np.mean(p.predictions.argmax(1) == p.label_ids))},
)
trainer.train()
print(trainer.state.best_metric, len(trainer.state.log_history))
