"""Claims requests ahead of need and prepares them."""
