"""tensordict: batches as TensorDict, a model as TensorDictModule."""

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

torch.manual_seed(0)
data = TensorDict({"pixels": torch.randn(640, 64), "label": torch.randint(0, 10, (640,))}, [640])
net = nn.Sequential(
    nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
)
model = TensorDictModule(net, in_keys=["pixels"], out_keys=["logits"])
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(20):
    batch = data[torch.randperm(640)[:64]].clone()
    batch = model(batch)
    loss = nn.functional.cross_entropy(batch["logits"], batch["label"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.5f}")
