"""The dashboard: its pages, the data for them, and their actions."""
