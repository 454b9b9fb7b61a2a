"""A state on disk: values as JSON, tensors in files of the safetensors format."""
