"""What a student's process may reach, and the signs that it tried more."""
