"""torch_geometric: a GIN over mini-batches of graphs."""

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_add_pool

torch.manual_seed(0)
graphs = []
for _ in range(128):
    n = int(torch.randint(6, 14, ()))
    edges = torch.randint(0, n, (2, 3 * n))
    graphs.append(Data(x=torch.randn(n, 8), edge_index=edges, y=torch.tensor([int(n > 9)])))


class GIN(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [(8, 64), (64, 64), (64, 64)]
        self.convs = nn.ModuleList(
            GINConv(nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))) for a, b in sizes
        )
        self.out = nn.Linear(64, 2)

    def forward(self, x, edge_index, batch):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.out(global_add_pool(x, batch))


model = GIN()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for epoch in range(2):
    for data in DataLoader(graphs, 16, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.x, data.edge_index, data.batch), data.y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
