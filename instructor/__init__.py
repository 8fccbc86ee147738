"""What instructors have and students do not: the sources of the labs, hidden checks, the build and the grading."""
