"""Makes the shipped model. The installed package does not contain this folder."""
