"""The watch: a small process beside each rank, which sees what the rank itself cannot say.

It sees that the rank died, though its launcher looks away and its peers sit in C code; that it
waits for a rank which has ended; that ranks wait for each other in different collectives. Then it
ends the ranks of the job, each one its own, so that none is left waiting.

```
rank 1 ── line ── watcher of rank 1 ─┐
rank 2 ── line ── watcher of rank 2 ─┼─ hub, in the watcher of rank 0 ── line ── rank 0
```

`attendant` lives in the rank and imports torch through `whereabouts`; everything else is the
watcher's program, which imports the standard library only.
"""
