"""Model families: their Hugging Face names, fields and layers, and which backends run them. Imports no torch."""
