"""What is done with the JSON schemas of requests before they are compiled."""
