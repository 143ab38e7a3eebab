"""Puts requests into a queue and reads their streams: clients, command, gateway, jobs."""
