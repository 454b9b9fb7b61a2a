"""torchmetrics: a MetricCollection over training and validation."""

import torch
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 512),
    nn.ReLU(),
    nn.Dropout(0.2),
    nn.Linear(512, 512),
    nn.ReLU(),
    nn.Linear(512, 5),
)
metrics = MetricCollection([MulticlassAccuracy(5), MulticlassF1Score(5)])
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
x = torch.randn(960, 64)
y = x[:, :5].argmax(1)
for epoch in range(2):
    for rows in torch.randperm(960).split(64):
        logits = model(x[rows])
        loss = nn.functional.cross_entropy(logits, y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics.update(logits, y[rows])
    print(epoch, {name: round(float(value), 5) for name, value in metrics.compute().items()})
    metrics.reset()
