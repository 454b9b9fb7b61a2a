"""A training for one process with Adam and 17 million parameters: `python host_copy.py STEPS`.

Prints the median milliseconds of a step and the MiB of memory of this process; memory that several
processes have is counted in equal parts.
"""

import statistics
import sys
from time import perf_counter

import torch
from torch import nn

FIRST = 6
torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(2048, 2048), nn.ReLU())))
optimizer = torch.optim.Adam(model.parameters(), 1e-4)
x = torch.randn(32, 2048)
times = []
for _ in range(FIRST + int(sys.argv[1])):
    begin = perf_counter()
    optimizer.zero_grad()
    (model(x) - x).square().mean().backward()
    optimizer.step()
    times.append(perf_counter() - begin)
with open("/proc/self/smaps_rollup") as lines:
    kib = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
print(statistics.median(times[FIRST:]) * 1000, kib / 1024)
