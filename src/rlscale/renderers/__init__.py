"""Renderers: messages to token ids and back, and the tree of the conversations of one trajectory."""
