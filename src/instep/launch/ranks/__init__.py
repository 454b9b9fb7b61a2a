"""The processes of the ranks on this host: their environment, their output, and their end."""
