"""Data loading of an unedited script: each rank loads its rows, all ranks get the whole batch."""
