"""Looking at configurations without running them: documentation, explanations, differences, schema, completion."""
