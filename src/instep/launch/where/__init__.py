"""`instep where`: what the ranks of a running job do, without stopping them.

`command` is the command. `instep run` prints the same on SIGQUIT and SIGUSR1 (`supervisor`).
"""
