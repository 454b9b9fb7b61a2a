"""One process, no parallelism: nothing that the rules are about."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader

from pictures import Pictures

random.seed(1)
torch.manual_seed(1)
noise = np.random.rand()
model = torch.nn.Linear(4, 2)
model.load_state_dict(torch.load("start.pt"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for images, labels in DataLoader(Pictures(), batch_size=4):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        print(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save({"epoch": epoch, "model": model.state_dict()}, "last.pt")
