"""transformers: a loop over a small GPT-2 with gradient accumulation."""

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=192, n_layer=4, n_head=4))
text = (torch.randint(0, 256, (320, 1)) + 7 * torch.arange(64)) % 256
loader = DataLoader(text, batch_size=8, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
for index, batch in enumerate(loader):
    outputs = model(batch, labels=batch)
    (outputs.loss / 2).backward()
    if index % 2 == 1:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if index % 10 == 0:
        print(f"{index}: {outputs.loss.item():.5f}")
