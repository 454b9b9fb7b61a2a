"""monai: a 3D UNet with DiceLoss on dictionaries of volumes."""

import monai
import torch
from monai.data import DataLoader, Dataset
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.transforms import Compose, EnsureTyped, ScaleIntensityd

monai.utils.set_determinism(0)
volumes = torch.rand(16, 1, 16, 16, 16)
rows = [{"image": v.numpy(), "label": (v > 0.5).float().numpy()} for v in volumes]
transform = Compose([ScaleIntensityd("image"), EnsureTyped(["image", "label"])])
loader = DataLoader(Dataset(rows, transform), batch_size=4, shuffle=True)
model = UNet(spatial_dims=3, in_channels=1, out_channels=1, channels=(8, 16, 32), strides=(2, 2))
loss_function = DiceLoss(sigmoid=True)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for epoch in range(3):
    total = 0.0
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_function(model(batch["image"]), batch["label"])
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: {total / len(loader):.4f}")
