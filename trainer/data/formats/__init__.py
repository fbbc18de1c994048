"""What texts and files of other people hold, whatever the names of their fields: imports nothing of
the project but its errors.
"""
