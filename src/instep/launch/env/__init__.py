"""`instep env`: a report on this job's ranks, and a test of every collective among them."""
