"""Starting a job on this host: supervisor, guard and workers. Nothing here imports torch."""
