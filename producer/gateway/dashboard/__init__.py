"""The dashboard: its files, the data on its pages, and the actions of administrators."""
