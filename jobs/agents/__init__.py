"""What a program that acts for a person asks of the service: the Model Context Protocol."""
