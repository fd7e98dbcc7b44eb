"""Sections of the report page, one module each. `page.py` lists them in their order."""
