"""accelerate: gradient accumulation by accumulate() over two optimizer groups."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
x = torch.randn(512, 16, 32)
model = nn.LSTM(32, 96, 2, batch_first=True)
head = nn.Linear(96, 4)
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], 2e-3)
loader = DataLoader(TensorDataset(x, x.mean((1, 2)).gt(0).long()), 32, shuffle=True, drop_last=True)
model, head, optimizer, loader = accelerator.prepare(model, head, optimizer, loader)
for epoch in range(2):
    for inputs, targets in loader:
        with accelerator.accumulate(model, head):
            loss = nn.functional.cross_entropy(head(model(inputs)[0][:, -1]), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"{epoch}: {loss.item():.5f}, {accelerator.num_processes} process")
accelerator.wait_for_everyone()
accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
