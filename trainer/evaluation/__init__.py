"""Scores: sums that merge over ranks, answers, similarity, and a whole evaluation."""
