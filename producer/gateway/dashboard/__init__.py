"""The dashboard: its pages, what feeds them, and what they may do."""
