"""Everything that enqueues requests or reads streams: clients, command, gateway, jobs."""
