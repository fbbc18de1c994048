"""What commands print about jobs: tables, logs, scores, and the HTML report."""
