"""ultralytics: YOLOv8n's model and loss in a loop."""

import torch
from ultralytics.cfg import get_cfg
from ultralytics.nn.tasks import DetectionModel

torch.manual_seed(0)
model = DetectionModel("yolov8n.yaml", ch=3, nc=4, verbose=False)
model.args = get_cfg()
model.train()
optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
for step in range(4):
    batch = {
        "img": torch.rand(8, 3, 64, 64),
        "cls": torch.randint(0, 4, (16, 1)).float(),
        "bboxes": torch.rand(16, 4) * 0.4 + 0.3,
        "batch_idx": torch.arange(16).float() // 2,
    }
    loss, _ = model(batch)
    optimizer.zero_grad()
    loss.sum().backward()
    optimizer.step()
    print(f"{step}: {loss.sum().item():.3f}")
