"""`instep env`: who this job's ranks are, what they have, and whether they can talk."""
