"""What a job would do before it is made: its rows, its tokens, its memory and its time."""
