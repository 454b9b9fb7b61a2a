"""transformers: gradient_checkpointing_enable with and without reentrant checkpoints."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
text = (torch.randint(0, 100, (128, 1)) + 3 * torch.arange(48)) % 100
for reentrant in (False, True):
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=100, n_positions=48, n_embd=128, n_layer=3, n_head=4)
    )
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for batch in text.split(8):
        loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"reentrant {reentrant}: {loss.item():.5f}")
