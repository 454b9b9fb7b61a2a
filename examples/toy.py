"""The ToyModel of PyTorch's tutorials, under any launcher.

python examples/toy.py
instep run -n 2 examples/toy.py
mpirun -n 2 python examples/toy.py
srun -n 8 --ntasks-per-node 8 python examples/toy.py
srun -N 2 python examples/toy.py --dist-file dist_file
torchrun --nproc-per-node 2 examples/toy.py
python -m torch.distributed.launch --nproc_per_node 2 examples/toy.py
"""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import instep


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.relu(self.fc1(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dist-file", help="meet in this file, and not where the launcher says")
    parser.add_argument(
        "--local-rank", "--local_rank", help="from torch.distributed.launch; unused"
    )
    parser.add_argument("--save", help="write the model here")
    args = parser.parse_args()
    if args.dist_file:
        job = os.environ.get("SLURM_JOB_ID", "0")
        instep.init(f"file://{os.path.abspath(args.dist_file)}.{job}")

    torch.manual_seed(0)
    model = ToyModel()
    data = TensorDataset(torch.randn(60, 10), torch.randn(60, 5))
    loader = DataLoader(data, batch_size=7, shuffle=True)

    model, loader = instep.replicate(model), instep.shard(loader)

    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        loss = instep.Mean()
        for inputs, labels in loader:
            optimizer.zero_grad()
            output = model(inputs)
            batch_loss = loss_fn(output, labels)
            batch_loss.backward()
            optimizer.step()
            loss.update(batch_loss, len(inputs))
        mean = loss.compute()
        if instep.rank == 0:
            print(f"epoch {epoch + 1}  loss {mean:.6f}  {instep.world}", flush=True)
    if args.save and instep.rank == 0:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
