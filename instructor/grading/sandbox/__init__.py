"""What a student's process may reach."""
