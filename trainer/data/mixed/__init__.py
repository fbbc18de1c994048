"""Several sources of rows in one run."""
