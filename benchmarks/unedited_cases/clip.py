"""openai/CLIP: two towers with a learned temperature, symmetric cross entropy."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Sequential(
            nn.Conv2d(3, 64, 8, 8), nn.Flatten(), nn.GELU(), nn.Linear(1024, 128)
        )
        self.words = nn.Embedding(100, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, 0.0, batch_first=True)
        self.text = nn.TransformerEncoder(layer, 2)
        self.logit_scale = nn.Parameter(torch.tensor(2.66))

    def encode_image(self, image):
        return F.normalize(self.visual(image), dim=-1)

    def encode_text(self, tokens):
        x = self.text(self.words(tokens))
        return F.normalize(x[torch.arange(len(x)), tokens.argmax(-1)], dim=-1)

    def forward(self, image, tokens):
        scale = self.logit_scale.exp()
        logits = scale * self.encode_image(image) @ self.encode_text(tokens).t()
        return logits, logits.t()


model = CLIP()
optimizer = torch.optim.Adam(model.parameters(), 3e-4)
for step in range(16):
    per_image, per_text = model(torch.randn(16, 3, 32, 32), torch.randint(0, 100, (16, 12)))
    target = torch.arange(16)
    loss = (F.cross_entropy(per_image, target) + F.cross_entropy(per_text, target)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.logit_scale.data.clamp_(0, 4.6052)
    if step % 5 == 0:
        print(f"{step}: {loss.item():.5f}")
model.eval()
with torch.no_grad():
    print(f"{model.encode_image(torch.ones(4, 3, 32, 32)).sum().item():.5f}")
