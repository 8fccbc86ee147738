"""A module for each lab. Its notebook's setup cell imports facts of the machine, helpers, plots and visible checks."""
