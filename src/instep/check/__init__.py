"""`instep check`: read a training script and name what will go wrong in parallel; runs nothing.

It leans on `errors` alone and starts without PyTorch. Begin with `script` (a parsed file) and
`script_info` (what the rules ask of it), then read one rule in `rules`; `checker` applies them.
"""
