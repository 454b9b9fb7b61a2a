"""Code that opens files itself, not with Python's `open`: known libraries get the location of each
file, and the kernel denies the writes of all others on ranks other than 0."""
