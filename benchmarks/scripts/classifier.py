"""A compute-bound classifier as a single-process script: trains, evaluates, prints what it took."""

import sys
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent))
from models import resnet18

samples = int(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
images, labels = torch.randn(samples, 3, 64, 64), torch.randint(0, 1000, (samples,))
loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)
model = resnet18()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

for epoch in range(2):
    start = perf_counter()
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    trained = perf_counter()
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum().item()
    print("epoch", epoch, trained - start, perf_counter() - trained, loss.item(), right)
