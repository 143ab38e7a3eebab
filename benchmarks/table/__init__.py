"""The side-by-side table: its workloads, how its rows are run, and what is made of the figures."""
