"""`labs bench choose`: time every SDPA backend over a grid of shapes, and say which is best where."""
