"""vector-quantize-pytorch: an autoencoder over VectorQuantize."""

import torch
from torch import nn
from vector_quantize_pytorch import VectorQuantize

torch.manual_seed(0)


class Auto(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.GELU(), nn.Conv2d(16, 32, 3, 2, 1)
        )
        self.quantize = VectorQuantize(dim=32, codebook_size=32, decay=0.9, accept_image_fmap=True)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.GELU(), nn.ConvTranspose2d(16, 1, 4, 2, 1)
        )

    def forward(self, x):
        codes, _, commitment = self.quantize(self.encoder(x))
        return self.decoder(codes), commitment


model = Auto()
optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
for step in range(15):
    x = torch.rand(32, 1, 16, 16)
    out, commitment = model(x)
    loss = (out - x).abs().mean() + 10 * commitment.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.4f}")
