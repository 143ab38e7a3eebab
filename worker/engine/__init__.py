"""The engine: continuous batching over a paged KV cache. It knows neither Redis nor asyncio."""
