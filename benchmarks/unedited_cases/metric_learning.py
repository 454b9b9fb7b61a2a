"""pytorch-metric-learning: a triplet loss with a miner."""

import torch
from pytorch_metric_learning import losses, miners
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(x, dtype=torch.float32)[:960] / 16, torch.tensor(y)[:960])
model = nn.Sequential(
    nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 32)
)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
miner, criterion = miners.MultiSimilarityMiner(), losses.TripletMarginLoss(margin=0.2)
for epoch in range(1):
    for index, (images, labels) in enumerate(DataLoader(data, 64, shuffle=True)):
        optimizer.zero_grad()
        embeddings = model(images)
        loss = criterion(embeddings, labels, miner(embeddings, labels))
        loss.backward()
        optimizer.step()
        if index % 5 == 0:
            print(f"{index}: {loss.item():.5f}")
