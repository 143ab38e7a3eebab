"""What puts requests into a queue and reads their token streams.

from producer import Client

with Client() as client:
    for event in client.stream(client.enqueue("Once upon a time", max_tokens=64)):
        print(event.text, end="", flush=True)
"""

from producer.async_client import AsyncClient
from producer.client import Client
from producer.jobs.local_batch import run_batch

__all__ = ["AsyncClient", "Client", "run_batch"]
