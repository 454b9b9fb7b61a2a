"""milesial/Pytorch-UNet: train.py, bilinear upsampling, cross entropy and Dice."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


def double(a, b):
    return nn.Sequential(
        nn.Conv2d(a, b, 3, padding=1, bias=False),
        nn.BatchNorm2d(b),
        nn.ReLU(inplace=True),
        nn.Conv2d(b, b, 3, padding=1, bias=False),
        nn.BatchNorm2d(b),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inc, self.down1, self.down2 = double(3, 16), double(16, 32), double(32, 32)
        self.up1, self.up2, self.outc = double(64, 16), double(32, 16), nn.Conv2d(16, 2, 1)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(F.max_pool2d(x1, 2))
        x3 = self.down2(F.max_pool2d(x2, 2))
        x = self.up1(torch.cat([x2, self.up(x3)], 1))
        return self.outc(self.up2(torch.cat([x1, self.up(x)], 1)))


def dice(p, t):
    both = 2 * (p * t).sum((-1, -2))
    sums = p.sum((-1, -2)) + t.sum((-1, -2))
    return 1 - ((both + 1e-6) / (torch.where(sums == 0, both, sums) + 1e-6)).mean()


net = UNet()
optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.999)
images = torch.rand(32, 3, 32, 32)
masks = (images.mean(1) > 0.5).long()
for step in range(10):
    rows = torch.randperm(32)[:8]
    predicted = net(images[rows])
    loss = F.cross_entropy(predicted, masks[rows])
    one_hot = F.one_hot(masks[rows], 2).permute(0, 3, 1, 2).float()
    loss = loss + dice(F.softmax(predicted, dim=1).float(), one_hot)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    if step % 3 == 0:
        print(f"{step}: {loss.item():.4f}")
