"""What this machine is, what it can run, and why not."""
