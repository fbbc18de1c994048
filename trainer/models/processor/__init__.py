"""What a processor computes in a way of its own, because memory is what it waits for."""
