"""Calls webhooks when requests end."""
