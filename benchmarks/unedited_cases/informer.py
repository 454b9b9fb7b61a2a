"""zhouhaoyi/Informer2020: ProbSparse attention with sampled keys."""

import math

import torch
from torch import nn

torch.manual_seed(0)


class ProbAttention(nn.Module):
    def forward(self, Q, K, V):
        B, H, L, D = Q.shape
        sample = min(int(3 * math.ceil(math.log(L))), L)
        index = torch.randint(L, (L, sample))
        K_sample = K.unsqueeze(-3).expand(B, H, L, L, D)[
            :, :, torch.arange(L).unsqueeze(1), index, :
        ]
        QK = torch.matmul(Q.unsqueeze(-2), K_sample.transpose(-2, -1)).squeeze(-2)
        M = QK.max(-1)[0] - torch.div(QK.sum(-1), L)
        top = M.topk(sample, sorted=False)[1]
        rows = torch.arange(B)[:, None, None], torch.arange(H)[None, :, None], top
        scores = torch.matmul(Q[rows], K.transpose(-2, -1)) / math.sqrt(D)
        context = V.mean(dim=-2).unsqueeze(-2).expand(B, H, L, D).clone()
        context[rows] = torch.matmul(torch.softmax(scores, -1), V).type_as(context)
        return context


class Informer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attention = nn.Conv1d(7, 128, 3, padding=1), ProbAttention()
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 7)

    def forward(self, x):
        x = self.embed(x.transpose(1, 2)).transpose(1, 2)
        B, L, _ = x.shape
        q, k, v = (t.view(B, L, 4, 32).transpose(1, 2) for t in self.qkv(x).split(128, -1))
        return self.out(x + self.attention(q, k, v).transpose(1, 2).reshape(B, L, 128))


model = Informer()
optimizer = torch.optim.Adam(model.parameters(), 1e-4)
for step in range(16):
    start = torch.rand(16, 1, 7) * 6
    series = torch.sin(start + torch.arange(49)[None, :, None] / 5)
    loss = nn.functional.mse_loss(model(series[:, :-1]), series[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.6f}")
