"""Steps of the optimizers of an unedited script on CPUs: by fused kernels, and divided."""
