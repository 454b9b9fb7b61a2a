"""pytorch/examples: gcn, one graph with masks."""

import torch
from torch import nn

torch.manual_seed(42)
nodes = 300
adjacency = (torch.rand(nodes, nodes) < 0.02).float()
adjacency = ((adjacency + adjacency.T) > 0).float() + torch.eye(nodes)
degree = adjacency.sum(1).rsqrt()
adjacency = degree[:, None] * adjacency * degree
features, labels = torch.randn(nodes, 64), torch.randint(0, 4, (nodes,))


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(64, 64) / 8)
        self.w2 = nn.Parameter(torch.randn(64, 4) / 8)

    def forward(self, x, a):
        x = torch.relu(a @ (x @ self.w1))
        return nn.functional.log_softmax(
            a @ (nn.functional.dropout(x, 0.3, self.training) @ self.w2), 1
        )


model = GCN()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for epoch in range(20):
    optimizer.zero_grad()
    output = model(features, adjacency)
    loss = nn.functional.nll_loss(output[:200], labels[:200])
    loss.backward()
    optimizer.step()
print(f"{loss.item():.5f}")
