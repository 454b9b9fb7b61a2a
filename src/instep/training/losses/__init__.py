"""The losses of replicas: those that an optimizer's closure returns, and what they divide by."""
