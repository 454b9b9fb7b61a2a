"""A rank whose program is any command, such as pytest or bash: this process becomes the command.

Python processes that the command starts find `sitecustomize` in this folder, and thereby the names
`horovod.torch` and `apex`.
"""
