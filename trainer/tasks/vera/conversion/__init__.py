"""Publishers' question-answering data, made into groups of statements: raw record -> Problem ->
statements.
"""
