"""pytorch/examples: word_language_model, an LSTM over columns with a repackaged state."""

import torch
from torch import nn

torch.manual_seed(1111)


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder, self.rnn = nn.Embedding(100, 128), nn.LSTM(128, 128, 2, dropout=0.2)
        self.decoder = nn.Linear(128, 100)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return nn.functional.log_softmax(self.decoder(self.drop(output)).view(-1, 100), 1), hidden


data = (torch.arange(20 * 20 * 16) * 7 % 100).view(20, -1).t().contiguous()
model, lr = RNNModel(), 5.0
optimizer = torch.optim.SGD(model.parameters(), lr)
hidden = (torch.zeros(2, 20, 128), torch.zeros(2, 20, 128))
for index, i in enumerate(range(0, 300, 20)):
    hidden = tuple(h.detach() for h in hidden)
    model.zero_grad()
    output, hidden = model(data[i : i + 20], hidden)
    loss = nn.functional.nll_loss(output, data[i + 1 : i + 21].reshape(-1))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    if index % 5 == 0:
        print(f"{index}: {loss.item():.4f}")
