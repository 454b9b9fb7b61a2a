"""A graph convolutional network: one graph is the whole batch, and cannot be divided by rows."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(42)

# Two communities and a half: who is near knows each other.
n, classes = 150, 3
labels = torch.arange(n) * classes // n
features = torch.randn(n, 16) + F.one_hot(labels, 16)
adjacency = (torch.rand(n, n) < torch.where(labels[:, None] == labels, 0.1, 0.01)).float()
adjacency = ((adjacency + adjacency.t()) > 0).float() + torch.eye(n)
adjacency = (adjacency / adjacency.sum(1, keepdim=True)).to_sparse()
order = torch.randperm(n)
idx_train, idx_val = order[:60], order[60:]


class GraphConvolution(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inside, outside))
        self.bias = nn.Parameter(torch.zeros(outside))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x, adj):
        return torch.spmm(adj, x @ self.weight) + self.bias


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2 = GraphConvolution(16, 16), GraphConvolution(16, classes)

    def forward(self, x, adj):
        x = F.dropout(torch.tanh(self.gc1(x, adj)), 0.5, training=self.training)
        return F.log_softmax(self.gc2(x, adj), dim=1)


model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(10):
    model.train()
    optimizer.zero_grad()
    output = model(features, adjacency)
    loss_train = F.nll_loss(output[idx_train], labels[idx_train])
    loss_train.backward()
    optimizer.step()
    model.eval()
    output = model(features, adjacency)
    acc_val = (output[idx_val].argmax(1) == labels[idx_val]).float().mean()
    print(f"Epoch: {epoch + 1:04d} loss_train: {loss_train.item():.4f} acc_val: {acc_val:.4f}")
