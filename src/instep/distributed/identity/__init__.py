"""This process's world, the launchers that set it, and the endpoint at which its ranks meet."""
