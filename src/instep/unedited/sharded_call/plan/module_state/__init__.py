"""What a module has, as far as a plan depends on it: attributes, objects, parameters and hooks."""
