"""torchfm: DeepFM on click data."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from torchfm.model.dfm import DeepFactorizationMachineModel

torch.manual_seed(0)
fields = [50, 30, 20, 10, 40]
x = torch.stack([torch.randint(0, n, (2048,)) for n in fields], 1)
y = ((x.sum(1) % 3) == 0).float()
model = DeepFactorizationMachineModel(fields, embed_dim=32, mlp_dims=(400, 400), dropout=0.2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)
criterion = torch.nn.BCELoss()
model.train()
for epoch in range(1):
    for index, (inputs, target) in enumerate(DataLoader(TensorDataset(x, y), 128, shuffle=True)):
        loss = criterion(model(inputs), target)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        if index % 5 == 0:
            print(f"{index}: {loss.item():.5f}")
