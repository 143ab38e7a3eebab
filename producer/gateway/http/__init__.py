"""HTTP itself: bodies, errors, limits, measurements."""
