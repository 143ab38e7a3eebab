"""Default times of autoscaling. Imports nothing: commands import this module at each start."""

TARGET_SECONDS = 30.0
"""The longest time in seconds that a request should wait."""
HOLD_SECONDS = 60.0
"""A worker is stopped after fewer workers were enough for this many seconds."""
