"""`jittor.dataset`: Dataset and DataLoader."""

from instep.compat.jittor.dataset.dataset import DataLoader, Dataset

__all__ = ["DataLoader", "Dataset"]
