"""The engine: continuous batching over a paged KV cache. Knows neither Redis nor asyncio."""
