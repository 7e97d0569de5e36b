"""The page of results: its sections, its figures, and the file."""
