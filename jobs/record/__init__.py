"""What is known of a job: its paths, its events, the verdict on them."""
