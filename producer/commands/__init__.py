"""What `promptq` does at a terminal, a file for each group of commands."""
