"""A small CNN on scikit-learn's scanned digits: written for one process, two lines for many.

python examples/digits.py                    one process
instep run -n 3 examples/digits.py           three, the same numbers
"""

import argparse
import json
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import instep


def build_model() -> nn.Module:
    # No bias before BatchNorm (it has no gradient, only rounding noise) and no kinks: if a ReLU
    # flips by rounding, one process differs from itself with another number of threads.
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def load_data() -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    x_train, x_test, y_train, y_test = (torch.as_tensor(part) for part in split)
    return (
        TensorDataset(x_train.float().view(-1, 1, 8, 8) / 16, y_train),
        TensorDataset(x_test.float().view(-1, 1, 8, 8) / 16, y_test),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", help="write the history (.json) and the model (.pt) here")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train_data, test_data = load_data()
    train_loader = DataLoader(train_data, args.batch_size, shuffle=True)
    test_loader = DataLoader(test_data, args.batch_size)
    model = build_model()

    model = instep.replicate(model)
    train_loader, test_loader = instep.shard(train_loader), instep.shard(test_loader)

    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    losses: list[float] = []
    samples = 0
    start = time.perf_counter()
    for epoch in range(args.epochs):
        model.train()
        for x, y in train_loader:
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            samples += len(x)
            batch_loss = instep.Mean()
            batch_loss.update(loss, len(x))
            losses.append(batch_loss.compute())
        schedule.step()

        model.eval()
        accuracy = instep.Accuracy()
        with torch.no_grad():
            for x, y in test_loader:
                accuracy.update(model(x), y)
        (top1,) = accuracy.compute()
        if instep.rank == 0:
            print(
                f"epoch {epoch + 1:2}  loss {losses[-1]:.4f}  test accuracy {top1:.4f}", flush=True
            )

    samples_per_rank = instep.all_gather_object(samples)
    if args.save and instep.rank == 0:
        torch.save(model.state_dict(), f"{args.save}.pt")
        with open(f"{args.save}.json", "w") as file:
            json.dump(
                {
                    "losses": losses,
                    "test_accuracy": top1,
                    "samples_per_rank": samples_per_rank,
                    "seconds": time.perf_counter() - start,
                },
                file,
            )


if __name__ == "__main__":
    main()
