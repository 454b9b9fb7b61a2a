"""Who this process is: its world, the launchers that say so, and where its ranks are to meet."""
