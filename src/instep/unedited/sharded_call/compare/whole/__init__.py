"""The whole forward of a call: what it returns, what it does beside that, and its gradients."""
