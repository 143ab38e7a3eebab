"""Measures the gateway's delay of a token, with a load, a bare relay and an attacker."""
