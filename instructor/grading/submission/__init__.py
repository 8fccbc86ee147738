"""One submission: the student's process, the checker's process, and what comes of them."""
