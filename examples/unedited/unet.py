"""Segmentation with a U-Net: a Dice loss over the whole batch, two forwards' worth of losses,
a rate that falls when the score on the validation set stands still."""

import logging

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.utils.data import DataLoader, Dataset, random_split


class Circles(Dataset):
    """Pictures of discs with noise, and where the disc is."""

    def __init__(self, count=96, size=24):
        generator = torch.Generator().manual_seed(3)
        grid = torch.stack(torch.meshgrid(*[torch.arange(size)] * 2, indexing="ij")).float()
        centre = torch.rand(count, 2, 1, 1, generator=generator) * size
        radius = 3 + torch.rand(count, 1, 1, generator=generator) * 6
        self.masks = ((grid - centre).square().sum(1).sqrt() < radius).long()
        noise = torch.randn(count, 3, size, size, generator=generator)
        self.images = self.masks.unsqueeze(1) + 0.5 * noise

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return {"image": self.images[i], "mask": self.masks[i]}


class DoubleConv(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(inside, outside, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.GELU(),
            nn.Conv2d(outside, outside, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.GELU(),
        )

    def forward(self, x):
        return self.double_conv(x)


class UNet(nn.Module):
    def __init__(self, n_channels, n_classes):
        super().__init__()
        self.n_channels, self.n_classes = n_channels, n_classes
        self.inc = DoubleConv(n_channels, 8)
        self.down1 = nn.Sequential(nn.AvgPool2d(2), DoubleConv(8, 16))
        self.down2 = nn.Sequential(nn.AvgPool2d(2), DoubleConv(16, 16))
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.up1, self.up2 = DoubleConv(32, 8), DoubleConv(16, 8)
        self.outc = nn.Conv2d(8, n_classes, kernel_size=1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.up1(torch.cat([x2, self.up(x3)], dim=1))
        return self.outc(self.up2(torch.cat([x1, self.up(x)], dim=1)))


def dice_coeff(input, target, epsilon=1e-6):
    inter = 2 * (input * target).sum()
    sets_sum = input.sum() + target.sum()
    return (inter + epsilon) / (sets_sum + epsilon)


def dice_loss(input, target):
    return 1 - dice_coeff(input.flatten(0, 1), target.flatten(0, 1))


@torch.inference_mode()
def evaluate(net, dataloader, device):
    net.eval()
    dice_score = 0
    for batch in dataloader:
        image, mask_true = batch["image"].to(device), batch["mask"].to(device)
        mask_true = F.one_hot(mask_true, net.n_classes).permute(0, 3, 1, 2).float()
        mask_pred = F.softmax(net(image), dim=1)
        dice_score += dice_coeff(mask_pred[:, 1:].flatten(0, 1), mask_true[:, 1:].flatten(0, 1))
    net.train()
    return dice_score / len(dataloader)


def train_model(model, device, epochs=2, batch_size=8, learning_rate=1e-3, val_percent=0.15):
    dataset = Circles()
    n_val = int(len(dataset) * val_percent)
    train_set, val_set = random_split(
        dataset, [len(dataset) - n_val, n_val], generator=torch.Generator().manual_seed(0)
    )
    train_loader = DataLoader(train_set, shuffle=True, batch_size=batch_size)
    val_loader = DataLoader(val_set, shuffle=False, drop_last=True, batch_size=batch_size)

    optimizer = optim.Adam(model.parameters(), lr=learning_rate, weight_decay=1e-8, eps=1e-5)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=1)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(1, epochs + 1):
        model.train()
        epoch_loss = 0
        for step, batch in enumerate(train_loader):
            images, true_masks = batch["image"].to(device), batch["mask"].to(device)
            masks_pred = model(images)
            loss = criterion(masks_pred, true_masks)
            loss += dice_loss(
                F.softmax(masks_pred, dim=1).float(),
                F.one_hot(true_masks, model.n_classes).permute(0, 3, 1, 2).float(),
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            epoch_loss += loss.item()
            if step % 5 == 4:
                val_score = evaluate(model, val_loader, device)
                scheduler.step(val_score)
                logging.info("Validation Dice score: %.4f", val_score)
        logging.info("epoch %d: loss %.4f", epoch, epoch_loss / len(train_loader))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = UNet(n_channels=3, n_classes=2).to(memory_format=torch.channels_last, device=device)
    train_model(model=model, device=device)
