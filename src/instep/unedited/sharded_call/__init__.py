"""The calls of a script's modules, divided among the ranks: own rows in, everyone's rows out."""
