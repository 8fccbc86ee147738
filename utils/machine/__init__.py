"""This machine: devices, versions, and reports on what runs here."""
