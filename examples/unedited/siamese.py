"""A siamese network: pairs drawn by Python's random in the data set, one encoder called twice."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, start, stop):
        digits = load_digits()
        self.images = torch.tensor(digits.images[start:stop], dtype=torch.float32).unsqueeze(1) / 16
        self.targets = digits.target[start:stop]
        self.groups = {c: (self.targets == c).nonzero()[0] for c in range(10)}

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        same = index % 2 == 0
        own = self.targets[index]
        other = own if same else random.choice([c for c in range(10) if c != own])
        partner = random.choice(self.groups[other])
        return self.images[index], self.images[partner], torch.tensor(float(same))


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.Mish(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1),
            nn.Mish(),
            nn.Flatten(),
        )
        self.fc = nn.Sequential(nn.Linear(512, 32), nn.Mish(), nn.Linear(32, 1))

    def forward(self, input1, input2):
        output = torch.cat((self.encoder(input1), self.encoder(input2)), 1)
        return self.fc(output)


def main():
    model = SiameseNetwork()
    optimizer = optim.Adagrad(model.parameters(), lr=0.01)
    train_loader = DataLoader(Pairs(0, 1200), shuffle=True, batch_size=64)
    test_loader = DataLoader(Pairs(1200, 1797), batch_size=200)
    for epoch in range(2):
        model.train()
        for images_1, images_2, targets in train_loader:
            optimizer.zero_grad()
            outputs = model(images_1, images_2).squeeze()
            loss = F.binary_cross_entropy_with_logits(outputs, targets)
            loss.backward()
            optimizer.step()
        model.eval()
        correct = 0
        for images_1, images_2, targets in test_loader:  # without no_grad, as it happens
            outputs = model(images_1, images_2).squeeze()
            correct += ((outputs > 0).float() == targets).sum().item()
        print(f"epoch {epoch}: loss {loss.item():.4f}, {correct}/{len(test_loader.dataset)}")


if __name__ == "__main__":
    main()
