"""The layers of changes over the file system, and in which directories they are kept."""
