"""The queue: calls of its Lua scripts, and the classes that send them."""
