"""Default times of autoscaling, in a file that loads nothing: commands read them at each start."""

TARGET_SECONDS = 30.0
"""How long a request should wait at most."""
HOLD_SECONDS = 60.0
"""How long fewer workers must suffice before one of the workers ends."""
