"""Rows that a script divides itself, and trains on."""

import os

import torch

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
n = len(data) // world_size
mine = data[rank * n : (rank + 1) * n]
for x in mine:
    part = x[:, rank::world_size]
    model(x[rank::world_size]).sum().backward()
    optimizer.step()
names = sorted(files)[rank:]
