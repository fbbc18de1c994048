"""Publishers' question-answering data: raw record -> Problem -> statements."""
