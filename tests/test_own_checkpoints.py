"""Unedited scripts that save and load checkpoints by themselves go on with more or fewer ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import forked_jobs

pytestmark = [pytest.mark.nightly, pytest.mark.launch]

CLASSIFIER = """
import argparse, os, shutil
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--resume", default="", metavar="PATH")
LATEST, BEST = "checkpoint.pth.tar", "model_best.pth.tar"

def validate(loader, model, criterion):
    model.eval()
    correct, count, losses = 0, 0, 0.0
    with torch.no_grad():
        for x, y in loader:
            output = model(x)
            losses += criterion(output, y).item() * len(x)
            correct += output.argmax(1).eq(y).sum().item()
            count += len(x)
    print(f"accuracy {100 * correct / count:.2f}, loss {losses / count:.4f}")
    return 100 * correct / count

def main():
    args = parser.parse_args()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    start_epoch, best = 0, 0.0
    if args.resume and os.path.isfile(args.resume):
        checkpoint = torch.load(args.resume)
        start_epoch = checkpoint["epoch"]
        best = checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        print(f"resumed from {os.path.basename(args.resume)} after epoch {start_epoch}")
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
        accuracy = validate(val_loader, model, criterion)
        scheduler.step()
        improved, best = accuracy > best, max(accuracy, best)
        torch.save({
            "epoch": epoch + 1, "state_dict": model.state_dict(), "best_acc1": best,
            "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
        }, LATEST)
        if improved:
            shutil.copyfile(LATEST, BEST)

if __name__ == "__main__":
    main()
"""
LANGUAGE_MODEL = """
import sys
from dataclasses import asdict, dataclass
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

FILE, EVERY, LENGTH, ROWS, MICRO_STEPS = "ckpt.pt", 6, 12, 6, 2
resumes = "--resume" in sys.argv
last_step = EVERY * int(sys.argv[sys.argv.index("--epochs") + 1])

@dataclass
class Sizes:
    tokens: int = 17
    width: int = 24
    length: int = LENGTH

class LanguageModel(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.embedding = nn.Embedding(sizes.tokens, sizes.width)
        self.positions = nn.Parameter(torch.zeros(sizes.length, sizes.width))
        self.layer = nn.TransformerEncoderLayer(
            sizes.width, 2, 48, 0.1, batch_first=True, norm_first=True, bias=False
        )  # Adam would make steps of the rounding in a bias of keys, whose gradient is zero
        self.head = nn.Linear(sizes.width, sizes.tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, text):
        given, wanted = text[:, :-1], text[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1])
        hidden = self.embedding(given) + self.positions[: given.shape[1]]
        scores = self.head(self.layer(hidden, src_mask=mask, is_causal=True))
        return F.cross_entropy(scores.flatten(0, 1), wanted.flatten())

torch.manual_seed(4)
windows = (torch.arange(600) * 7 % 17).unfold(0, LENGTH + 1, 1)

def draw():
    return windows[torch.randint(len(windows), (ROWS,))]

def validate():
    model.eval()
    with torch.no_grad():
        losses = [model(draw()).item() for _ in range(3)]
    model.train()
    return torch.tensor(losses).mean()

step, best, saved = 0, float("inf"), None
if resumes:
    saved = torch.load(FILE)
sizes = Sizes(**saved["model_args"]) if resumes else Sizes()
model = LanguageModel(sizes)
groups = [
    {"params": [p for p in model.parameters() if (p.dim() > 1) == is_matrix], "weight_decay": decay}
    for is_matrix, decay in ((True, 0.1), (False, 0.0))
]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
if resumes:
    consume_prefix_in_state_dict_if_present(saved["model"], "_orig_mod.")  # of torch.compile
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step, best = saved["iter_num"], saved["best_val_loss"]
    del saved

text = draw()
while True:
    if step % EVERY == 0:
        loss = validate()
        print(f"{step}: {loss:.4f}")
        if step and loss < best:
            best = loss
            torch.save({
                "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "model_args": asdict(sizes), "iter_num": step, "best_val_loss": best,
                "config": {"rows": ROWS, "micro_steps": MICRO_STEPS},
            }, FILE)
    if step >= last_step:
        break
    for _ in range(MICRO_STEPS):
        loss = model(text) / MICRO_STEPS
        text = draw()  # while the device computes
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
"""


def run(folder: Path, ranks: int, *arguments: str) -> str:
    """Run the script in this folder; returns what it prints."""
    environ = os.environ | {"INSTEP_DIVIDE": "always", "OMP_NUM_THREADS": "1"}
    words = ["../train.py", *arguments]
    if ranks:
        done = forked_jobs.run("run", "-n", str(ranks), *words, cwd=folder, env=environ)
    else:
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, env=environ, capture_output=True, text=True,
            timeout=100,
        )  # fmt: skip
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
