"""`labs bench choose`: time every SDPA backend over a grid of shapes, and report which is best where."""
