"""What keeps many processes going: started, watched, ended and restarted.  Free of JAX."""
