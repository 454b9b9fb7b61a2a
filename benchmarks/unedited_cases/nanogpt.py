"""karpathy/nanoGPT: train.py, scaled dot-product attention, micro-steps, its own schedule."""

import math

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1337)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(128, bias=False), nn.LayerNorm(128, bias=False)
        self.c_attn, self.c_proj = nn.Linear(128, 384, bias=False), nn.Linear(128, 128, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128), nn.Dropout(0.1)
        )

    def forward(self, x):
        B, T, C = x.size()
        parts = self.c_attn(self.ln_1(x)).split(128, dim=2)
        q, k, v = (t.view(B, T, 4, C // 4).transpose(1, 2) for t in parts)
        p = 0.1 if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        parts = {"wte": nn.Embedding(65, 128), "wpe": nn.Embedding(64, 128)}
        parts |= {"drop": nn.Dropout(0.1), "h": nn.ModuleList(Block() for _ in range(3))}
        self.transformer = nn.ModuleDict(parts | {"ln_f": nn.LayerNorm(128)})
        self.lm_head = nn.Linear(128, 65, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        t = self.transformer
        x = t.drop(t.wte(idx) + t.wpe(torch.arange(idx.size(1))))
        for block in t.h:
            x = block(x)
        x = t.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, 65), targets.view(-1), ignore_index=-1)


data = (torch.arange(5000) * 7 + torch.arange(5000) // 11) % 65
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
for step in range(10):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * min((step + 1) / 3, 0.5 * (1 + math.cos(math.pi * step / 10)) + 0.1)
    for _ in range(2):
        starts = torch.randint(len(data) - 65, (8,))
        x = torch.stack([data[i : i + 64] for i in starts])
        y = torch.stack([data[i + 1 : i + 65] for i in starts])
        _, loss = model(x, y)
        (loss / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % 3 == 0:
        print(f"iter {step}: loss {loss.item():.4f}")
model.eval()
with torch.no_grad():
    idx = torch.zeros((1, 1), dtype=torch.long)
    for _ in range(10):
        logits, _ = model(idx)
        probs = F.softmax(logits[:, -1, :] / 0.8, dim=-1)
        idx = torch.cat((idx, torch.multinomial(probs, num_samples=1)), dim=1)
print(idx.tolist())
