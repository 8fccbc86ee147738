"""A class: submissions taken in, spread over processes or machines, and written into a gradebook."""
