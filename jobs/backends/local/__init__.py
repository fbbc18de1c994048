"""The backend `local` (its class stands in backend.py)."""
