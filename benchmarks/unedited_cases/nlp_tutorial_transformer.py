"""graykode/nlp-tutorial: the Transformer, masks made inside of forward."""

import numpy as np
import torch
from torch import nn

torch.manual_seed(0)


def pad_mask(q, k):
    return k.data.eq(0).unsqueeze(1).expand(len(q), q.size(1), k.size(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 128)
        self.out, self.norm = nn.Linear(128, 128), nn.LayerNorm(128)

    def forward(self, Q, K, V, mask):
        q, k, v = (
            f(t).view(len(Q), -1, 4, 32).transpose(1, 2)
            for f, t in ((self.q, Q), (self.k, K), (self.v, V))
        )
        scores = torch.matmul(q, k.transpose(-1, -2)) / np.sqrt(32)
        scores.masked_fill_(mask.unsqueeze(1).repeat(1, 4, 1, 1), -1e9)
        context = torch.matmul(nn.Softmax(dim=-1)(scores), v).transpose(1, 2)
        return self.norm(self.out(context.contiguous().view(len(Q), -1, 128)) + Q)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(30, 128), nn.Embedding(30, 128)
        self.encoder = nn.ModuleList(Attention() for _ in range(2))
        self.decoder = nn.ModuleList(Attention() for _ in range(4))
        self.projection = nn.Linear(128, 30, bias=False)

    def forward(self, enc, dec):
        x, y = self.source(enc), self.target(dec)
        for layer in self.encoder:
            x = layer(x, x, x, pad_mask(enc, enc))
        ahead = torch.from_numpy(np.triu(np.ones((len(dec), dec.size(1), dec.size(1))), k=1)).byte()
        own = torch.gt(pad_mask(dec, dec) + ahead, 0)
        for a, b in zip(self.decoder[::2], self.decoder[1::2]):
            y = b(a(y, y, y, own), x, x, pad_mask(dec, enc))
        return self.projection(y).view(-1, 30)


model = Transformer()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(20):
    enc = torch.randint(1, 30, (16, 12)) * (torch.arange(12) < torch.randint(6, 13, (16, 1)))
    loss = nn.CrossEntropyLoss(ignore_index=0)(model(enc, enc), enc.view(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 5 == 0:
        print(f"Epoch: {epoch:04d} cost = {loss.item():.5f}")
