"""HTTP itself: bodies, errors, bounds, measurements."""
