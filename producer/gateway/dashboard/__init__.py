"""The dashboard: its page, the data on the page, and the actions of administrators."""
