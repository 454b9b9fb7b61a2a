"""Data loading of unedited scripts: each rank loads its rows of a batch, and the ranks exchange
them, so that every rank's loop gets the whole batch.
"""
