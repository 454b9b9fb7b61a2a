"""eriklindernoren/PyTorch-GAN: dcgan.py with spectral norm in the critic."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

torch.manual_seed(0)
generator = nn.Sequential(
    nn.ConvTranspose2d(64, 64, 4, 1, 0, bias=False),
    nn.BatchNorm2d(64),
    nn.ReLU(True),
    nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(True),
    nn.ConvTranspose2d(32, 1, 4, 2, 1),
    nn.Tanh(),
)
critic = nn.Sequential(
    spectral_norm(nn.Conv2d(1, 32, 4, 2, 1)),
    nn.LeakyReLU(0.2),
    nn.Dropout2d(0.25),
    spectral_norm(nn.Conv2d(32, 64, 4, 2, 1)),
    nn.LeakyReLU(0.2),
    nn.Flatten(),
    nn.Linear(1024, 1),
)
g = torch.optim.Adam(generator.parameters(), 2e-4, betas=(0.5, 0.999))
d = torch.optim.Adam(critic.parameters(), 2e-4, betas=(0.5, 0.999))
criterion, real = nn.BCEWithLogitsLoss(), torch.randn(256, 1, 16, 16).tanh()
valid, fake = torch.ones(32, 1), torch.zeros(32, 1)
for step in range(8):
    g.zero_grad()
    made = generator(torch.randn(32, 64, 1, 1))
    g_loss = criterion(critic(made), valid)
    g_loss.backward()
    g.step()
    d.zero_grad()
    images = real[torch.randperm(256)[:32]]
    d_loss = (criterion(critic(images), valid) + criterion(critic(made.detach()), fake)) / 2
    d_loss.backward()
    d.step()
    print(f"[{step}] D {d_loss.item():.4f} G {g_loss.item():.4f}")
