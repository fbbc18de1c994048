"""`lathe judge`: a trained model against another one, row by row, and the gate before final/."""
