"""timm: MobileNetV3 and EfficientNet with label smoothing."""

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy

torch.manual_seed(0)
images, labels = torch.randn(128, 3, 64, 64), torch.randint(0, 10, (128,))
for name in ("mobilenetv3_small_050", "efficientnet_lite0"):
    model = timm.create_model(name, num_classes=10, drop_rate=0.1)
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-4, momentum=0.9)
    criterion = LabelSmoothingCrossEntropy(0.1)
    for step in range(12):
        rows = torch.randperm(128)[:16]
        loss = criterion(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"{name} {step}: {loss.item():.4f}")
