"""What is asked of a whole queue, and told to it."""
