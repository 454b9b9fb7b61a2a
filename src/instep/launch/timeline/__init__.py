"""`instep timeline`: draws the file that INSTEP_TIMELINE or `instep run --timeline` has written."""
