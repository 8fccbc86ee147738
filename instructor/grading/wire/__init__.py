"""What travels between the checker's process and the student's."""
