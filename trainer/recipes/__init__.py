"""What reproduces published sets and groups; imported by commands and groups alone."""
