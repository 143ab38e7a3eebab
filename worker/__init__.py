"""A long-running worker: claims requests, runs them in one continuous batch, streams tokens."""
