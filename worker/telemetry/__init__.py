"""What a worker measures, and where it shows it."""
