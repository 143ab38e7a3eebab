"""What the routes of a gateway share: the queue, the caller, and cancels in the background."""
