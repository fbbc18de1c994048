"""The backend `toolkit` (its class stands in backend.py)."""
