"""sthalles/SimCLR: run.py, two views, InfoNCE over the batch."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, 2, 1, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, 2, 1, bias=False),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(2),
    nn.Flatten(),
    nn.Linear(256, 256),
    nn.ReLU(),
    nn.Linear(256, 64),
)
optimizer = torch.optim.Adam(model.parameters(), 3e-4, weight_decay=1e-4)
criterion = nn.CrossEntropyLoss()
for step in range(15):
    image = torch.randn(16, 3, 32, 32)
    views = torch.cat([image + 0.1 * torch.randn_like(image), image.flip(3)])
    features = F.normalize(model(views), dim=1)
    labels = torch.cat([torch.arange(16)] * 2)
    labels = (labels[None] == labels[:, None]).float()
    similarity = features @ features.T
    own = torch.eye(32, dtype=torch.bool)
    labels, similarity = labels[~own].view(32, -1), similarity[~own].view(32, -1)
    positives = similarity[labels.bool()].view(32, -1)
    negatives = similarity[~labels.bool()].view(32, -1)
    logits = torch.cat([positives, negatives], 1) / 0.07
    loss = criterion(logits, torch.zeros(32, dtype=torch.long))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.3f}")
