"""torchvision: ResNet-18, MobileNetV2 and DenseNet-121 as in the classification references."""

import torch
from torch import nn
from torchvision import models

torch.manual_seed(0)
images, labels = torch.randn(64, 3, 64, 64), torch.randint(0, 10, (64,))
for build in (models.resnet18, models.mobilenet_v2, models.densenet121):
    model = build(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for step in range(6):
        rows = torch.randperm(64)[:12]
        output = model(images[rows])
        loss = criterion(output, labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{build.__name__}: {loss.item():.3f}")
