"""What losses divide by, the weights of averaged ones, and the losses of optimizers' closures."""
