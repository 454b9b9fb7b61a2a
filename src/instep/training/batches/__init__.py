"""The batch to which a forward belongs.

It is known from the batch's own tensors and from whatever shares their memory: views, `detach()`,
NumPy arrays. Where a script gives the model other tensors (a copy on the GPU, noise of the batch's
size), the order of its requests leaves one batch in a plain loop, and several in a loop that loads
ahead or uses several loaders. Among these the number of rows decides. If it does not, that is an
error.
"""
