"""Runs that outlive their ranks: `trainval.py --survive`."""
