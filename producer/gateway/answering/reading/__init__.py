"""From the body of a call to requests."""
