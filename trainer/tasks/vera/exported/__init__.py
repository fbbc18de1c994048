"""Code that is written beside an exported verifier."""
