"""Starts server, workers, gateway and jobs from one terminal."""
