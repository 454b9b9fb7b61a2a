"""facebookresearch/moco: a momentum encoder and a queue."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder_q = nn.Sequential(
            nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64)
        )
        self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(64, 256), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _enqueue(self, keys):
        start = int(self.queue_ptr)
        self.queue[:, start : start + len(keys)] = keys.T
        self.queue_ptr[0] = (start + len(keys)) % 256

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            for a, b in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
                b.data = b.data * 0.99 + a.data * 0.01
            k = F.normalize(self.encoder_k(im_k), dim=1)
        positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        logits = torch.cat([positive, q @ self.queue.clone().detach()], 1) / 0.2
        self._enqueue(k)
        return logits, torch.zeros(len(q), dtype=torch.long)


model = MoCo()
optimizer = torch.optim.SGD(model.encoder_q.parameters(), 0.03, momentum=0.9)
for step in range(20):
    x = torch.randn(32, 128)
    output, target = model(x, x + 0.1 * torch.randn_like(x))
    loss = F.cross_entropy(output, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.5f}")
