"""kornia: augmentation of whole batches before a small network."""

import kornia.augmentation as K
import torch
from torch import nn

torch.manual_seed(0)
augment = K.AugmentationSequential(
    K.RandomHorizontalFlip(p=0.5), K.RandomAffine(15.0, p=0.7), K.ColorJiggle(0.1, 0.1, 0.1, 0.1)
)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(16):
    images, labels = torch.rand(16, 3, 32, 32), torch.randint(0, 10, (16,))
    loss = nn.functional.cross_entropy(model(augment(images)), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.5f}")
