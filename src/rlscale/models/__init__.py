"""Models as Hugging Face folders: built on demand, checked, and loaded through transformers.

Imports nothing: an engine reads a model's config without `rlscale.config`, which takes 0.5 s to import.
"""
