"""performer-pytorch: a causal language model with linear attention."""

import torch
from performer_pytorch import PerformerLM
from torch.nn import functional as F

torch.manual_seed(0)
model = PerformerLM(num_tokens=64, max_seq_len=32, dim=96, depth=2, heads=4, causal=False)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(15):
    batch = (torch.randint(0, 64, (12, 1)) + 5 * torch.arange(33)) % 64
    loss = F.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.5f}")
