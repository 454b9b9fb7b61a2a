"""Mixed precision with a gradient scaler, gradients accumulated over several batches."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
accumulation_steps = 3

digits = load_digits()
dataset = TensorDataset(
    torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
)
train_set, val_set = random_split(dataset, [1500, len(dataset) - 1500])
train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
val_loader = DataLoader(val_set, batch_size=128)

model = nn.Sequential(
    nn.Linear(64, 96),
    nn.LayerNorm(96),
    nn.GELU(),
    nn.Dropout(0.1),
    nn.Linear(96, 48),
    nn.GELU(),
    nn.Linear(48, 10),
).to(device)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler(device)

for epoch in range(3):
    model.train()
    optimizer.zero_grad()
    for i, (inputs, targets) in enumerate(train_loader):
        inputs, targets = inputs.to(device), targets.to(device)
        with torch.autocast(device_type=device, dtype=torch.bfloat16):
            loss = criterion(model(inputs), targets) / accumulation_steps
        scaler.scale(loss).backward()
        if (i + 1) % accumulation_steps == 0 or i + 1 == len(train_loader):
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    model.eval()
    correct = 0
    with torch.no_grad(), torch.autocast(device_type=device, dtype=torch.bfloat16):
        for inputs, targets in val_loader:
            prediction = model(inputs.to(device)).argmax(1)
            correct += (prediction == targets.to(device)).sum().item()
    print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {correct / len(val_set):.4f}")
