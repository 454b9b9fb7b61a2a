"""What the script's objects refer to, and which variables its functions name."""
