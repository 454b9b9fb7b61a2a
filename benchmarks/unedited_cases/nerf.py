"""yenchenlin/nerf-pytorch: rays in chunks, positional encoding, volume rendering."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


def encode(x, bands=6):
    waves = [f(x * 2.0**k) for k in range(bands) for f in (torch.sin, torch.cos)]
    return torch.cat([x, *waves], -1)


class NeRF(nn.Module):
    def __init__(self):
        super().__init__()
        self.pts = nn.ModuleList([nn.Linear(39, 128), nn.Linear(128, 128), nn.Linear(167, 128)])
        self.out = nn.Linear(128, 4)

    def forward(self, x):
        h = x
        for i, layer in enumerate(self.pts):
            h = F.relu(layer(h))
            if i == 1:
                h = torch.cat([x, h], -1)
        return self.out(h)


def batchify(net, chunk):
    return lambda x: torch.cat([net(x[i : i + chunk]) for i in range(0, len(x), chunk)], 0)


model = NeRF()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
z = torch.linspace(2, 6, 16)
for step in range(15):
    origin, direction = torch.randn(128, 3), F.normalize(torch.randn(128, 3), dim=1)
    goal = torch.sigmoid(direction)
    depth = z + torch.rand(128, 16) * 0.25
    points = origin[:, None] + direction[:, None] * depth[..., None]
    raw = batchify(model, 512)(encode(points.view(-1, 3))).view(128, 16, 4)
    alpha = 1 - torch.exp(-F.relu(raw[..., 3]) * 0.25)
    through = torch.cumprod(torch.cat([torch.ones(128, 1), 1 - alpha + 1e-10], 1), 1)[:, :-1]
    rgb = ((alpha * through)[..., None] * torch.sigmoid(raw[..., :3])).sum(1)
    loss = ((rgb - goal) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = 5e-4 * 0.1 ** (step / 1000)
    if step % 5 == 0:
        print(f"{step}: {loss.item():.6f}")
