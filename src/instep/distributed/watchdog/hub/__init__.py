"""The hub: what the watchers of a job report comes together here, in the watcher of rank 0.

```
watchers ── new_connections ── hub ─┬─ first_failure   which rank failed first; ends the others
                                    ├─ rank_ends       which ranks have ended
                                    ├─ deadlocks       ranks that wait for each other
                                    ├─ mismatch_check  ranks in different collectives
                                    ├─ signals         signals that take effect on all ranks
                                    └─ stalls          ranks that have waited long
```

`hub` (begin there) passes each message to one of them; `watchdog.job_state` is what all of them
know.
"""
