"""geoopt: embeddings on the Poincare ball, RiemannianAdam."""

import geoopt
import torch
from torch import nn

torch.manual_seed(0)
ball = geoopt.PoincareBall()


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.points = geoopt.ManifoldParameter(torch.randn(500, 64) * 1e-3, manifold=ball)
        self.scale = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, pairs):
        distance = ball.dist(self.points[pairs[:, 0]], self.points[pairs[:, 1]], keepdim=True)
        return self.scale(distance).squeeze(1)


model = Embeddings()
optimizer = geoopt.optim.RiemannianAdam(model.parameters(), lr=1e-2)
for step in range(20):
    pairs = torch.randint(0, 500, (256, 2))
    labels = (pairs.sum(1) % 7 == 0).float()
    loss = nn.functional.binary_cross_entropy_with_logits(model(pairs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.5f}")
