"""A small training that can be spoilt in many ways: `train.py [--KIND ...] SABOTAGE ...`."""

import argparse
import contextlib

import torch
from sabotage import CORES
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import instep

SAMPLES, FEATURES, CLASSES, BATCH = 44, 6, 3, 8  # the last of 6 batches has 4 samples


class Points(Dataset):
    def __init__(self, noisy, dtype):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=dtype)
        self.y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
        self.noisy = noisy

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x = self.x[index]
        return (x + 0.1 * torch.randn_like(x) if self.noisy else x), self.y[index]


def build_model(spoilt, norm):
    layers = [nn.Linear(FEATURES, 16, bias=norm)]
    layers += [nn.BatchNorm1d(16)] if norm else []
    layers += [nn.Tanh()]
    layers += [nn.Dropout(0.3)] if spoilt & {"dropout", "dropout_by_rank"} else []
    return nn.Sequential(*layers, nn.Linear(16, CLASSES))


def loss_of(output, target, spoilt):
    if "stated_sum" in spoilt:
        instep.weight(None)
    if spoilt & {"sum", "stated_sum"}:
        return cross_entropy(output, target, reduction="sum") / 8
    weighted = spoilt & {"class_weights", "stated_class_weights"}
    weight = torch.tensor([0.1, 1.0, 5.0]) if weighted else None
    if "stated_class_weights" in spoilt:
        instep.weight(weight[target].sum())
    return cross_entropy(output, target, weight=weight)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("spoilt", nargs="*")
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--norm", action="store_true")
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    spoilt = set(args.spoilt)
    for name in spoilt & CORES.keys():
        CORES[name]()

    many = instep.world_size > 1
    torch.manual_seed(instep.rank if "seed_by_rank" in spoilt else 0)
    if "unseeded" in spoilt:
        torch.seed()
    data = Points(bool(spoilt & {"augmentation", "augmented_by_rank"}), torch.float32)
    model = build_model(spoilt, args.norm)
    loader = DataLoader(data, BATCH, shuffle=True)
    if "distributed_sampler" in spoilt and many:
        sampler = DistributedSampler(data, instep.world_size, instep.rank)
        loader = DataLoader(data, BATCH // instep.world_size, sampler=sampler)
    elif "not_sharded" not in spoilt:
        loader = instep.shard(loader)
    if not spoilt & {"not_replicated", "seed_by_rank"}:
        statistics = "rank" if "rank_statistics" in spoilt else "global"
        dropout = "rank" if "dropout_by_rank" in spoilt else "global"
        model = instep.replicate(model, batch_statistics=statistics, dropout=dropout)

    rate = 0.05 * (instep.world_size if "scaled_rate" in spoilt else 1)
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
    for epoch in range(args.epochs):
        for x, y in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=args.half):
                loss = loss_of(model(x), y, spoilt)
            if "loss_by_rank" in spoilt and instep.rank == 1:
                loss = 1.1 * loss
            optimizer.zero_grad()
            loss.backward()
            if "gradient_by_rank" in spoilt and instep.rank == 1 and epoch:
                for parameter in model.parameters():
                    parameter.grad *= 1.5
            optimizer.step()
            if "stepped_by_rank" in spoilt and many and instep.rank == 1:
                with torch.no_grad():
                    model[0].weight.mul_(1.01)
            if "buffer_by_rank" in spoilt and instep.rank == 1 and epoch:
                model[1].running_var.mul_(1.5)
            if "plateau" in spoilt:
                plateau.step(loss.item())
            else:
                for _ in range(instep.world_size if "schedule_by_ranks" in spoilt else 1):
                    schedule.step()
            if "stops_early" in spoilt and many:
                return


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
