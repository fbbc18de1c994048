"""What a client of the Tinker dialect looks up: models, sessions, runs, saved weights, archives."""
