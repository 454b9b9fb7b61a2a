"""Signals take effect at the same point of the program on every rank.

A terminal or a launcher interrupts each rank at another time. If each raised KeyboardInterrupt at
once, one might have entered a collective that another never enters. So a rank that is interrupted
only reports it. The hub lets all ranks pause before their next collective, collects how many each
has entered, and chooses one that none has entered: the exception is raised at the script's next
line after that one. If no collective follows, the hub lets it be raised where the ranks are.

The script's handler of SIGTERM, SIGUSR1 or SIGUSR2, which asks for a checkpoint, is
called in the same way: else one rank would leave after a step that another has ended before its
signal came.

`rank_signals` (begin there), `interrupt_frames` and `script_handlers` run in the rank,
`signal_coordinator` in the hub.
"""
