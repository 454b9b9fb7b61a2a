"""skorch: NeuralNetClassifier in scikit-learn's manner."""

import torch
from sklearn.datasets import load_digits
from skorch import NeuralNetClassifier
from torch import nn

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = x.astype("float32") / 16, y.astype("int64")
module = nn.Sequential(
    nn.Linear(64, 512),
    nn.ReLU(),
    nn.Dropout(0.3),
    nn.Linear(512, 256),
    nn.ReLU(),
    nn.Linear(256, 10),
)
net = NeuralNetClassifier(
    module, criterion=nn.CrossEntropyLoss, max_epochs=2, lr=0.1, batch_size=128,
    iterator_train__shuffle=True, verbose=0,
)  # fmt: skip
net.fit(x, y)
print([round(row["valid_loss"], 5) for row in net.history], net.predict(x[:40]).tolist())
