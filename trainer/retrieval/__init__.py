"""From vectors to judged rankings: search, runs, measures, negatives."""
