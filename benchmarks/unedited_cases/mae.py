"""facebookresearch/mae: random masking by argsort of noise, a loss on masked patches."""

import torch
from torch import nn

torch.manual_seed(0)


def encoder(depth):
    layer = nn.TransformerEncoderLayer(96, 4, 192, 0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


class MAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Linear(48, 96), nn.Parameter(torch.randn(1, 64, 96) * 0.02)
        self.encoder, self.decoder, self.head = encoder(2), encoder(1), nn.Linear(96, 48)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, 96))

    def forward(self, patches):
        x = self.embed(patches) + self.position
        N, L, D = x.shape
        keep = L // 4
        shuffle = torch.argsort(torch.rand(N, L), dim=1)
        restore = torch.argsort(shuffle, dim=1)
        kept = shuffle[:, :keep].unsqueeze(-1).repeat(1, 1, D)
        latent = self.encoder(torch.gather(x, 1, kept))
        mask = torch.ones(N, L)
        mask[:, :keep] = 0
        mask = torch.gather(mask, 1, restore)
        tokens = torch.cat([latent, self.mask_token.repeat(N, L - keep, 1)], 1)
        tokens = torch.gather(tokens, 1, restore.unsqueeze(-1).repeat(1, 1, D)) + self.position
        loss = (self.head(self.decoder(tokens)) - patches).pow(2).mean(-1)
        return (loss * mask).sum() / mask.sum(), mask


model = MAE()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95))
for step in range(12):
    loss, mask = model(torch.randn(16, 64, 48))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"{step}: {loss.item():.5f} {mask.mean().item():.3f}")
