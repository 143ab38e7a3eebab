"""What puts requests into a queue and reads their token streams.

from promptq.producer import Client

with Client() as client:
    for event in client.stream(client.enqueue("Once upon a time", max_tokens=64)):
        print(event.text, end="", flush=True)
"""

from promptq.producer.batches.local_batch import run_batch
from promptq.producer.clients.async_client import AsyncClient
from promptq.producer.clients.sync_client import Client

__all__ = ["AsyncClient", "Client", "run_batch"]
