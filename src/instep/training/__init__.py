"""One model in step: this rank's rows, the global batch's gradient and statistics."""
