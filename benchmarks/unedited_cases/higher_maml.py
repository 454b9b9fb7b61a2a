"""higher: MAML's inner loop with innerloop_ctx."""

import higher
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
meta = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(8):
    meta.zero_grad()
    total = 0.0
    for task in range(3):
        phase, inner = torch.rand(()) * 3, torch.optim.SGD(model.parameters(), 0.01)
        x, q = torch.rand(20, 1) * 10 - 5, torch.rand(20, 1) * 10 - 5
        with higher.innerloop_ctx(model, inner, copy_initial_weights=False) as (fast, stepper):
            for _ in range(2):
                stepper.step(nn.functional.mse_loss(fast(x), torch.sin(x + phase)))
            loss = nn.functional.mse_loss(fast(q), torch.sin(q + phase))
            loss.backward()
            total += loss.item()
    meta.step()
    print(f"{step}: {total:.4f}")
