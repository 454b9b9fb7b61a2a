"""`instep slurm`: a batch script for a job of one rank per GPU or core."""
