"""Models as Hugging Face folders: made on the spot, checked, and loaded through transformers.

Imports nothing: an engine reads architectures without the configuration, which takes half a second to import.
"""
