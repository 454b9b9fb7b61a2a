"""graykode/nlp-tutorial: Seq2Seq with the hidden state as an argument."""

import torch
from torch import nn

torch.manual_seed(0)


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.RNN(30, 128, dropout=0.0), nn.RNN(30, 128)
        self.fc = nn.Linear(128, 30)

    def forward(self, enc, hidden, dec):
        _, state = self.encode(enc.transpose(0, 1), hidden)
        outputs, _ = self.decode(dec.transpose(0, 1), state)
        return self.fc(outputs)


model = Seq2Seq()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
eye = torch.eye(30)
for epoch in range(24):
    words = torch.randint(0, 30, (32, 10))
    hidden = torch.zeros(1, 32, 128)
    optimizer.zero_grad()
    output = model(eye[words], hidden, eye[words.flip(1)]).transpose(0, 1)
    loss = sum(criterion(output[i], words[i]) for i in range(32))
    loss.backward()
    optimizer.step()
    if epoch % 8 == 0:
        print(f"{epoch}: {loss.item():.5f}")
