"""accelerate: a loop with prepare, backward and gather_for_metrics."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
x = torch.randn(512, 64)
y = x[:, :10].argmax(1)
model = nn.Sequential(
    nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, 2 * len(loader))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for epoch in range(2):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    model.eval()
    right = 0
    for inputs, targets in loader:
        with torch.no_grad():
            guess = model(inputs).argmax(-1)
        guess, targets = accelerator.gather_for_metrics((guess, targets))
        right += (guess == targets).sum().item()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.5f}, right {right}")
accelerator.save_state("checkpoint")
