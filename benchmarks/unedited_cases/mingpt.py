"""karpathy/minGPT: a sorter by a GPT of its own attention, weight decay by groups."""

import math

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(3407)


class Block(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.ln1, self.ln2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(length, length))[None, None])

    def forward(self, x):
        B, T, C = x.size()
        split = self.qkv(self.ln1(x)).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in split)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.softmax(att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")), dim=-1)
        y = (self.drop(att) @ v).transpose(1, 2).contiguous().view(B, T, C)
        x = x + self.drop(self.proj(y))
        return x + self.drop(self.mlp(self.ln2(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(10, 96), nn.Embedding(16, 96)
        self.blocks = nn.Sequential(*(Block(96, 4, 16) for _ in range(3)))
        self.head = nn.Linear(96, 10, bias=False)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1))[None])
        logits = self.head(self.blocks(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, 10), targets.view(-1), ignore_index=-1)


model = GPT()
decay = [p for p in model.parameters() if p.dim() > 1]
rest = [p for p in model.parameters() if p.dim() <= 1]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.95))
for step in range(20):
    x = torch.randint(0, 3, (64, 6))
    whole = torch.cat([x, x.sort(1).values], 1)
    inputs, targets = whole[:, :-1], whole[:, 1:].clone()
    targets[:, :5] = -1
    _, loss = model(inputs, targets)
    model.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 5 == 0:
        print(f"iter {step}: train loss {loss.item():.5f}")
