"""What is kept of a run: step folders to resume from, and the released layout in and out."""
