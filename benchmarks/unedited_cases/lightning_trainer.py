"""lightning: Trainer with validation, a logger and checkpoints."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(0)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(32 * 49, 10),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


x = torch.randn(640, 1, 14, 14)
data = TensorDataset(x, (x[:, 0, 3, 3] * 4).long().abs() % 10)
train, val = DataLoader(data, 32, shuffle=True), DataLoader(data, 64)
trainer = L.Trainer(
    max_epochs=2,
    accelerator="cpu",
    enable_progress_bar=False,
    log_every_n_steps=5,
    enable_model_summary=False,
    logger=L.pytorch.loggers.CSVLogger("logs"),
)
trainer.fit(Classifier(), train, val)
print({name: round(value.item(), 5) for name, value in trainer.callback_metrics.items()})
