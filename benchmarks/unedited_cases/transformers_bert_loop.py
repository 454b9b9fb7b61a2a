"""transformers: the course's loop, BERT for the classification of sequences."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

torch.manual_seed(0)
config = BertConfig(
    vocab_size=200, hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
    intermediate_size=256, num_labels=2,
)  # fmt: skip
model = BertForSequenceClassification(config)
ids = torch.randint(5, 200, (192, 32))
mask = (torch.arange(32) < torch.randint(8, 33, (192, 1))).long()
labels = (ids[:, 1] > 100).long()
loader = DataLoader(TensorDataset(ids, mask, labels), batch_size=16, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
steps = 2 * len(loader)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=steps)
model.train()
for epoch in range(2):
    for input_ids, attention_mask, target in loader:
        outputs = model(input_ids=input_ids, attention_mask=attention_mask, labels=target)
        outputs.loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: loss {outputs.loss.item():.5f}")
