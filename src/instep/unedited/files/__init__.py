"""The files of an unedited script on several ranks: all ranks see what one process would see.

Rank 0 changes the real files and first copies what was there into a layer called `before`. Every
other rank writes into a layer of its own and reads through it: its own layer first, then `before`,
then the real files. After a command that rank 0 ran for all ranks, a new generation starts with
empty layers, because then the real files are right for every rank.
"""
