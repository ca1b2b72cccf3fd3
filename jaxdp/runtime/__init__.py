"""What surrounds the steps of a run on its machine.  Nothing here imports JAX."""
