"""What the gateway adds to a token, with its load, its relay and its attacker."""
