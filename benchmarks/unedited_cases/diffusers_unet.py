"""diffusers: the unconditional image generation loop with UNet2DModel and DDPMScheduler."""

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup

torch.manual_seed(0)
model = UNet2DModel(
    sample_size=16, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=8,
    block_out_channels=(32, 64), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)  # fmt: skip
noise_scheduler = DDPMScheduler(num_train_timesteps=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
lr_scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 16)
data = torch.randn(128, 1, 16, 16).tanh()
for step, clean in enumerate(data.repeat(2, 1, 1, 1).split(16)):
    noise = torch.randn(clean.shape)
    timesteps = torch.randint(0, 100, (clean.shape[0],), dtype=torch.int64)
    noisy = noise_scheduler.add_noise(clean, noise, timesteps)
    predicted = model(noisy, timesteps, return_dict=False)[0]
    loss = F.mse_loss(predicted, noise)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    lr_scheduler.step()
    optimizer.zero_grad()
    if step % 4 == 0:
        print(f"step {step}: {loss.item():.5f}")
