"""lion-pytorch: Lion on a transformer encoder of torch."""

import torch
from lion_pytorch import Lion
from torch import nn

torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(128, 64)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.encoder(self.embed(x), mask=mask, is_causal=True))


model = Model()
optimizer = Lion(model.parameters(), lr=1e-4, weight_decay=1e-2)
for step in range(20):
    x = (torch.randint(0, 64, (16, 1)) + 3 * torch.arange(25)) % 64
    loss = nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.4f}")
