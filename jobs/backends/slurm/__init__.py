"""The backend `slurm` (its class stands in backend.py)."""
