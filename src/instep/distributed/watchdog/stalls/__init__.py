"""Stalls: ranks that have waited long in a collective, and what keeps the other ranks from it.

```
rank: python_stacks ── watcher: rank_watch, probe ── hub: stall_coordinator ── report on stderr
                                                       └─ job_socket ── `instep where`
```

`stall_coordinator` (begin there) runs in the hub, `rank_watch` in each rank's watcher,
`python_stacks` in the rank.
"""
