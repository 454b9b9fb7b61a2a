"""lightning: Fabric, a loop with setup, backward and save."""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
fabric.seed_everything(0)
x = torch.randn(640, 128)
loader = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), 32, shuffle=True)
model = nn.Sequential(
    nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10)
)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
    fabric.print(f"epoch {epoch}: {loss.item():.5f}")
fabric.save("state.ckpt", {"model": model, "optimizer": optimizer})
