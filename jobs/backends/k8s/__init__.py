"""The backend `k8s` (its class stands in backend.py)."""
