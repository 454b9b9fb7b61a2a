"""einops: an MLP-Mixer of Rearrange layers."""

import torch
from einops.layers.torch import Rearrange, Reduce
from torch import nn

torch.manual_seed(0)


class Residual(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(96), nn.Sequential(*layers)

    def forward(self, x):
        return x + self.layers(self.norm(x))


def mixer():
    tokens = nn.Conv1d(16, 64, 1), nn.GELU(), nn.Dropout(0.1), nn.Conv1d(64, 16, 1)
    channels = nn.Linear(96, 384), nn.GELU(), nn.Dropout(0.1), nn.Linear(384, 96)
    return Residual(*tokens), Residual(*channels)


model = nn.Sequential(
    Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=8, q=8),
    nn.Linear(192, 96),
    *mixer(),
    *mixer(),
    nn.LayerNorm(96),
    Reduce("b n d -> b d", "mean"),
    nn.Linear(96, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(20):
    x, y = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.5f}")
