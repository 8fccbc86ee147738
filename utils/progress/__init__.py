"""How far a student is in a lab: `record.py` knows which visible checks have passed, `panel.py` shows it in JupyterLab."""
