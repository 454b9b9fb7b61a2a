"""A model of which a rank uses all layers only if one of its rows is marked."""

from __future__ import annotations

from torch import Tensor, nn


class Detour(nn.Module):
    """Between two batch normalisations, a layer for marked rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        self.detour = nn.Linear(6, 6)
        self.leave = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 4) to (rows, 3)."""
        marked = x[:, :1] > 100
        x = self.enter(x).relu()
        return self.leave(x + marked * self.detour(x) if marked.any() else x)
