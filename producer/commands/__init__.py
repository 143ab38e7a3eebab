"""The commands of `promptq`, one file for each group."""
