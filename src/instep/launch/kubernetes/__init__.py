"""`instep k8s`: the manifest of a job for Kubernetes, with Kubeflow's operators."""
