"""Many processes: started, joined, watched, ended and restarted.

What the launcher uses of it imports no JAX.
"""
