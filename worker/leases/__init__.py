"""The requests that a worker holds, each from its claim to its end.

`prefetcher` claims requests within the `token_budget`, and `held_and_lost_leases` holds a `lease`
for each request. `prepare_or_resume` checks and tokenises a request. A preparation that may take
long runs in the `slow_lane`, so that other requests do not wait for this preparation. A prepared
request waits in the `ready` queue until `held_and_lost_leases` hands the request to the engine. The
`publisher` fetches the engine's outputs, and the `coalescer` joins tokens that come too fast.
`rows` turns each output into a row (an event for Redis), and the `publisher` sends the rows of all
requests in one call.

`exchange` makes all other calls to Redis: it renews leases, carries out cancels and gives requests
back. `exchange` also acts on each answer of Redis. If an answer ends a lease, `exit_log` records in
the log and the trace how the request left this worker, and `meter` counts the request.
"""
