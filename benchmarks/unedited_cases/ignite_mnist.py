"""pytorch-ignite: Engine, evaluator with metrics and a checkpoint."""

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy, Loss
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y))
loader = DataLoader(torch.utils.data.Subset(data, range(640)), 64, shuffle=True)
val = DataLoader(torch.utils.data.Subset(data, range(640, 900)), 128)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
    nn.Flatten(), nn.Dropout(0.3), nn.Linear(2048, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
criterion = nn.CrossEntropyLoss()
trainer = create_supervised_trainer(model, optimizer, criterion)
evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy(), "loss": Loss(criterion)})


@trainer.on(Events.EPOCH_COMPLETED)
def validate(engine):
    evaluator.run(val)
    print(engine.state.epoch, {k: round(v, 4) for k, v in evaluator.state.metrics.items()})


saver = Checkpoint({"model": model}, DiskSaver("saved", require_empty=False), n_saved=1)
trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
trainer.run(loader, max_epochs=2)
