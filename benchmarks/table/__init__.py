"""The side-by-side table: its workloads, its rows, and the evaluation of the figures."""
