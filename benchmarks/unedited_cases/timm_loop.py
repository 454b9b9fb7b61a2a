"""timm: a ViT with mixup, drop path, AdamW by create_optimizer_v2 and an EMA model."""

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, random_seed

random_seed(0)
model = timm.create_model(
    "vit_tiny_patch16_224", img_size=64, patch_size=8, depth=3, num_classes=10, drop_path_rate=0.1
)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
scheduler = CosineLRScheduler(optimizer, t_initial=20, warmup_t=4, t_in_epochs=False)
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=10)
ema = ModelEmaV3(model, decay=0.99)
criterion = SoftTargetCrossEntropy()
images, labels = torch.randn(320, 3, 64, 64), torch.randint(0, 10, (320,))
model.train()
for step in range(20):
    rows = torch.randperm(320)[:16]
    x, y = mixup(images[rows], labels[rows])
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update(model, step=step)
    scheduler.step_update(step)
    if step % 5 == 0:
        print(f"step {step}: {loss.item():.5f}")
ema.eval()
with torch.no_grad():
    print(f"ema {ema(images[:64]).logsumexp(1).mean().item():.5f}")
