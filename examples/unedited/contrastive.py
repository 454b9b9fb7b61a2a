"""Contrastive learning: every sample is compared with all others of the batch, the targets come
from a moving average of the weights, and one layer is under spectral norm."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader


def augment(x):
    return x + 0.2 * torch.randn_like(x) * (torch.rand(len(x), 1) < 0.8)


class Encoder(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.backbone = nn.Sequential(
            spectral_norm(nn.Linear(64, 64)),
            nn.BatchNorm1d(64),
            nn.SiLU(),
            nn.Dropout(0.1),
            nn.Linear(64, 32),
        )
        self.projector = nn.Sequential(nn.SiLU(), nn.Linear(32, dim))

    def forward(self, x):
        return F.normalize(self.projector(self.backbone(x)), dim=1)


def nt_xent(a, b, temperature=0.5):
    similarity = a @ b.t() / temperature
    labels = torch.arange(len(a))
    return (F.cross_entropy(similarity, labels) + F.cross_entropy(similarity.t(), labels)) / 2


images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
loader = DataLoader(images, batch_size=128, shuffle=True)
online = Encoder()
target = copy.deepcopy(online)
for p in target.parameters():
    p.requires_grad = False
optimizer = torch.optim.RMSprop(online.parameters(), lr=1e-4, eps=1e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=2 * len(loader))

for epoch in range(2):
    total = 0.0
    for x in loader:
        with torch.no_grad():
            keys = target(augment(x))
        loss = nt_xent(online(augment(x)), keys)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(online.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for p, q in zip(online.parameters(), target.parameters()):
                q.mul_(0.99).add_(p, alpha=0.01)
        total += loss.item() * len(x)
    print(f"epoch {epoch}: loss {total / len(images):.4f}")
