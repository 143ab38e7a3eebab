"""Commands for whoever looks after a server: API keys, models, webhooks, addresses and users."""
