"""locuslab/TCN: the adding problem with weight-normalised dilated convolutions."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

torch.manual_seed(1111)


class Chomp1d(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        return x[:, :, : -self.size].contiguous()


class TCN(nn.Module):
    def __init__(self):
        super().__init__()
        layers, width = [], 2
        for level in range(4):
            d = 2**level
            conv = weight_norm(nn.Conv1d(width, 30, 7, padding=6 * d, dilation=d))
            layers += [conv, Chomp1d(6 * d), nn.ReLU(), nn.Dropout(0.1)]
            width = 30
        self.net, self.linear = nn.Sequential(*layers), nn.Linear(30, 1)

    def forward(self, x):
        return self.linear(self.net(x)[:, :, -1])


model = TCN()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for step in range(16):
    values, marks = torch.rand(32, 1, 200), torch.zeros(32, 1, 200)
    marks.scatter_(2, torch.randint(0, 200, (32, 1, 2)), 1.0)
    goal = (values * marks).sum(2)
    loss = nn.functional.mse_loss(model(torch.cat([values, marks], 1)), goal)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.6f}")
