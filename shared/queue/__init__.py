"""The queue: its Lua scripts as calls, and what sends them."""
