"""transformers: Trainer on a small GPT-2 with evaluation and checkpoints."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)


class Tokens(Dataset):
    def __init__(self, count):
        start = torch.randint(0, 50, (count, 1))
        self.ids = (start + 3 * torch.arange(32)) % 50

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


config = GPT2Config(vocab_size=50, n_positions=32, n_embd=128, n_layer=3, n_head=4)
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=16,
    num_train_epochs=2,
    learning_rate=1e-3,
    eval_strategy="epoch",
    save_strategy="epoch",
    logging_steps=5,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
model = GPT2LMHeadModel(config)
trainer = Trainer(model, arguments, train_dataset=Tokens(160), eval_dataset=Tokens(32))
trainer.train()
print(f"eval loss {trainer.evaluate()['eval_loss']:.5f}")
