"""What the notebooks' setup cells import: for each lab its machine, helpers, plots and visible checks, by one line."""
