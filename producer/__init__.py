"""What puts requests into a queue and reads their token streams."""
