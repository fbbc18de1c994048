"""What keeps driven runs going: their jobs, what a token may use, what expires."""
