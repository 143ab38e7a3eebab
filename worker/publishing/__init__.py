"""Publishes what the engine makes, a step in one round trip."""
