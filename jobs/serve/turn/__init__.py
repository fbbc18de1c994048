"""What the keeper does in one turn besides acting: it reads, and notes what it cannot read."""
