"""What a worker and an engine say to each other; no torch here."""
