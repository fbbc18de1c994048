"""What an experiment takes from another model: a run that it goes on with, or a teacher. Imports no
torch.
"""
