"""guoyang9/NCF: NeuMF with negative sampling and HR@10."""

import torch
from torch import nn

torch.manual_seed(0)


class NCF(nn.Module):
    def __init__(self):
        super().__init__()
        self.user_gmf, self.item_gmf = nn.Embedding(100, 64), nn.Embedding(300, 64)
        self.user_mlp, self.item_mlp = nn.Embedding(100, 256), nn.Embedding(300, 256)
        self.mlp = nn.Sequential(
            nn.Dropout(0.1),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(256, 128),
            nn.ReLU(),
        )
        self.predict = nn.Linear(192, 1)

    def forward(self, user, item):
        gmf = self.user_gmf(user) * self.item_gmf(item)
        both = torch.cat((self.user_mlp(user), self.item_mlp(item)), -1)
        return self.predict(torch.cat((gmf, self.mlp(both)), -1)).view(-1)


model = NCF()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(20):
    user, item = torch.randint(0, 100, (256,)), torch.randint(0, 300, (256,))
    label = ((user + item) % 5 == 0).float()
    model.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(user, item), label)
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.5f}")
model.eval()
hits = 0
for user in range(20):
    items = torch.arange(100)
    _, best = torch.topk(model(torch.full((100,), user), items), 10)
    hits += int((((best + user) % 5) == 0).any())
print(f"HR {hits / 20:.3f}")
