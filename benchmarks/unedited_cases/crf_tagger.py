"""pytorch-crf: a BiLSTM-CRF tagger with masks."""

import torch
from torch import nn
from torchcrf import CRF

torch.manual_seed(0)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.lstm = nn.LSTM(64, 64, batch_first=True, bidirectional=True)
        self.scores = nn.Linear(128, 5)
        self.crf = CRF(5, batch_first=True)

    def forward(self, words, tags, mask):
        scores = self.scores(self.lstm(self.embedding(words))[0])
        return -self.crf(scores, tags, mask=mask, reduction="mean")


model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for step in range(16):
    words = torch.randint(0, 100, (16, 20))
    mask = torch.arange(20) < torch.randint(5, 21, (16, 1))
    loss = model(words, words % 5, mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.4f}")
