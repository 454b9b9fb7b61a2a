"""`instep run --max-restarts`: a job whose rank has failed is started again.

It leans on the supervisor, which runs one attempt. Begin with `attempts`; `policy` decides, from
how an attempt ended, whether there is another one and of how many ranks.
"""
