"""Limits: what one client may hold of the server, so that nobody keeps the others out."""
