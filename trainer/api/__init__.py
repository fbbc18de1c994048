"""What notebooks and programs call: the commands `lathe train`, `predict`, `plan` and `submit` as
functions.
"""
