"""What the routes of a gateway share: the queue, the caller, cancels on their way."""
