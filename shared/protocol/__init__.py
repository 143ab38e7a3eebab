"""The protocol in Redis as types: keys, requests, events, claims and rows."""
