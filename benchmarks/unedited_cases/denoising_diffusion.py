"""denoising-diffusion-pytorch: GaussianDiffusion over a Unet."""

import torch
from denoising_diffusion_pytorch import GaussianDiffusion, Unet

torch.manual_seed(0)
model = Unet(dim=16, dim_mults=(1, 2), channels=1, flash_attn=False)
diffusion = GaussianDiffusion(model, image_size=16, timesteps=50)
optimizer = torch.optim.Adam(diffusion.parameters(), 1e-3)
for step in range(16):
    loss = diffusion(torch.rand(16, 1, 16, 16))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.5f}")
