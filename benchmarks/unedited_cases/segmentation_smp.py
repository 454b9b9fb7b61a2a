"""segmentation-models-pytorch: Unet over a ResNet with DiceLoss."""

import segmentation_models_pytorch as smp
import torch

torch.manual_seed(0)
model = smp.Unet("resnet18", encoder_weights=None, in_channels=3, classes=1)
criterion = smp.losses.DiceLoss(mode="binary")
optimizer = torch.optim.Adam(model.parameters(), 1e-4)
images = torch.rand(32, 3, 64, 64)
masks = (images.mean(1, keepdim=True) > 0.5).float()
for step in range(6):
    rows = torch.randperm(32)[:8]
    loss = criterion(model(images[rows]), masks[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{step}: {loss.item():.4f}")
