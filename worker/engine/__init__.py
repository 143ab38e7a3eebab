"""The engine: continuous batching over a paged KV cache. It uses neither Redis nor asyncio."""
