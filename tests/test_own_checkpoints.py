"""Unedited scripts that save and load checkpoints by themselves go on with more or fewer ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.nightly, pytest.mark.launch]

CLASSIFIER = """
import argparse, os, shutil
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--resume", default="", metavar="PATH")
best_acc1 = 0.0

def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")

def validate(loader, model, criterion):
    model.eval()
    correct, count, losses = 0, 0, 0.0
    with torch.no_grad():
        for x, y in loader:
            output = model(x)
            losses += criterion(output, y).item() * len(x)
            correct += output.argmax(1).eq(y).sum().item()
            count += len(x)
    print(f" * Acc@1 {100 * correct / count:.2f} Loss {losses / count:.4f}")
    return 100 * correct / count

def main():
    global best_acc1
    args = parser.parse_args()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    start_epoch = 0
    if args.resume and os.path.isfile(args.resume):
        checkpoint = torch.load(args.resume)
        start_epoch = checkpoint["epoch"]
        best_acc1 = checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        print(f"=> loaded checkpoint '{os.path.basename(args.resume)}' (epoch {start_epoch})")
    x = torch.randn(120, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :3].argmax(1))
    train_loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=0)
    val_loader = DataLoader(data, batch_size=50)
    for epoch in range(start_epoch, args.epochs):
        model.train()
        for inputs, target in train_loader:
            loss = criterion(model(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        acc1 = validate(val_loader, model, criterion)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        save_checkpoint({
            "epoch": epoch + 1, "state_dict": model.state_dict(), "best_acc1": best_acc1,
            "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
        }, is_best)

if __name__ == "__main__":
    main()
"""
LANGUAGE_MODEL = """
import os, sys
from dataclasses import asdict, dataclass
import torch
from torch import nn
from torch.nn import functional as F

init_from = "resume" if "--resume" in sys.argv else "scratch"
max_iters = int(sys.argv[sys.argv.index("--epochs") + 1]) * 6
out_dir, eval_interval, block_size, batch_size = ".", 6, 12, 6
accumulation = 2
names = [k for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, str))]
config = {k: globals()[k] for k in names}

@dataclass
class GPTConfig:
    vocab_size: int = 17
    n_embd: int = 24
    block_size: int = 12

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.block = nn.TransformerEncoderLayer(
            config.n_embd, 2, 48, 0.1, batch_first=True, norm_first=True, bias=False
        )  # Adam would make steps of the rounding in a bias of keys, whose gradient is zero
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        t = idx.shape[1]
        x = self.wte(idx) + self.wpe(torch.arange(t))
        mask = nn.Transformer.generate_square_subsequent_mask(t)
        logits = self.lm_head(self.block(x, src_mask=mask, is_causal=True))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

torch.manual_seed(1337)
data = torch.arange(600) * 7 % 17

def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    return x, torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])

@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(3)
    for k in range(3):
        losses[k] = model(*get_batch())[1].item()
    model.train()
    return losses.mean()

iter_num, best_val_loss = 0, 1e9
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"))
    model_args = checkpoint["model_args"]
else:
    model_args = asdict(GPTConfig(block_size=block_size))
model = GPT(GPTConfig(**model_args))
decay = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
if init_from == "resume":
    state_dict = checkpoint["model"]
    for k in list(state_dict):
        if k.startswith("_orig_mod."):
            state_dict[k[len("_orig_mod."):]] = state_dict.pop(k)
    model.load_state_dict(state_dict)
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
checkpoint = None

x, y = get_batch()
while True:
    if iter_num % eval_interval == 0:
        loss = estimate_loss()
        print(f"step {iter_num}: val loss {loss:.4f}")
        if loss < best_val_loss and iter_num > 0:
            best_val_loss = loss
            torch.save({
                "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "model_args": model_args, "iter_num": iter_num,
                "best_val_loss": best_val_loss, "config": config,
            }, os.path.join(out_dir, "ckpt.pt"))
    if iter_num >= max_iters:
        break
    for _ in range(accumulation):
        loss = model(x, y)[1] / accumulation
        x, y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
"""


def run(folder: Path, ranks: int, *arguments: str) -> str:
    """Run the script in this folder; returns what it prints."""
    launcher = ["-m", "instep", "run", "-n", str(ranks)] if ranks else []
    done = subprocess.run(
        [sys.executable, *launcher, "../train.py", *arguments],
        cwd=folder,
        env=os.environ | {"INSTEP_DIVIDE": "always", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("script", "file"),
    [(CLASSIFIER, "checkpoint.pth.tar"), (LANGUAGE_MODEL, "ckpt.pt")],
    ids=["classifier", "language model"],
)
def test_its_own_checkpoint_of_two_ranks_is_resumed_by_three_and_by_one(
    script: str, file: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(script)
    printed = {}
    for sizes in ((0, 0), (2, 3)):
        folder = tmp_path / str(sizes[0])
        folder.mkdir()
        first = run(folder, sizes[0], "--epochs", "2")
        left = sorted(os.listdir(folder))
        shutil.copytree(folder, tmp_path / f"{sizes[0]}, first part")
        printed[sizes] = [first, run(folder, sizes[1], "--epochs", "4", "--resume", file)]
        assert sorted(os.listdir(folder)) == left
    shutil.copytree(tmp_path / "2, first part", folder := tmp_path / "2, then 1")
    printed[2, 1] = [first, run(folder, 1, "--epochs", "4", "--resume", file)]
    assert printed[2, 3] == printed[2, 1] == printed[0, 0]
    one, many, fewer = (
        torch.load(tmp_path / name / file, weights_only=False) for name in ("0", "2", "2, then 1")
    )
    assert one.pop("config", None) == many.pop("config", None) == fewer.pop("config", None)
    for resumed in (many, fewer):
        torch.testing.assert_close(resumed, one, rtol=1e-4, atol=1e-5)
