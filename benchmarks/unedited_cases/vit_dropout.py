"""vit-pytorch: ViT with dropout."""

import torch
from torch import nn
from vit_pytorch import ViT

torch.manual_seed(0)
model = ViT(
    image_size=32, patch_size=4, num_classes=10, dim=128, depth=3, heads=4, mlp_dim=256,
    dropout=0.1, emb_dropout=0.1,
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.7)
for step in range(20):
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.5f}")
