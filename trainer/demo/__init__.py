"""`make demo`: some training, and then ten questions; and the base that it starts from."""
