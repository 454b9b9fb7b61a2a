"""The watchdog: a small process beside each rank, which sees failures that the rank cannot report.

It sees that the rank died, whatever its launcher does; that the rank waits for one that has ended;
that ranks wait for each other in different collectives. Then it ends the ranks of the job, each
watcher its own, so that none is left waiting.

```
rank 1 ── connection ── watcher of rank 1 ─┐
rank 2 ── connection ── watcher of rank 2 ─┼─ hub, in the watcher of rank 0 ── connection ── rank 0
```

It leans on `process` and on `identity`. `client` (begin there), `call_stack`
run in the rank; the others are the watcher's program, which imports the standard library only.
"""
