"""The settings that every process reads from its environment."""
