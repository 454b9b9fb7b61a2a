"""`instep verify`: run a script at several numbers of ranks, record, compare, explain.

It leans on `instep.launch` to start the runs. Begin with `verification` (run, judge, report), then
`recording.recorder` (what is recorded in a rank) and `verdict` (how runs are judged).
"""
