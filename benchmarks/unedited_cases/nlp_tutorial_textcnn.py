"""graykode/nlp-tutorial: TextCNN and a Bi-LSTM with attention, states made inside of forward."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class TextCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.W = nn.Embedding(200, 64)
        self.filters = nn.ModuleList(nn.Conv2d(1, 32, (size, 64)) for size in (2, 3, 4))
        self.out = nn.Linear(96, 2)

    def forward(self, X):
        embedded = self.W(X).unsqueeze(1)
        pooled = []
        for conv in self.filters:
            h = F.relu(conv(embedded))
            pooled.append(nn.MaxPool2d((h.size(2), 1))(h).permute(0, 3, 2, 1))
        return self.out(torch.cat(pooled, 3).view(-1, 96))


class BiLSTMAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(200, 64), nn.LSTM(64, 64, bidirectional=True)
        self.out = nn.Linear(128, 2)

    def forward(self, X):
        inputs = self.embedding(X).permute(1, 0, 2)
        zero = torch.zeros(2, len(X), 64), torch.zeros(2, len(X), 64)
        output, (last, _) = self.lstm(inputs, zero)
        output = output.permute(1, 0, 2)
        hidden = last.permute(1, 0, 2).reshape(len(X), 128, 1)
        weights = F.softmax(torch.bmm(output, hidden).squeeze(2), 1)
        return self.out(torch.bmm(output.transpose(1, 2), weights.unsqueeze(2)).squeeze(2))


for build in (TextCNN, BiLSTMAttention):
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(15):
        X = torch.randint(0, 200, (48, 20))
        loss = nn.CrossEntropyLoss()(model(X), (X[:, 0] > 100).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{build.__name__}: {loss.item():.5f}")
