"""Translation between the chat APIs and token ids: plain functions from JSON to JSON, without a server."""
