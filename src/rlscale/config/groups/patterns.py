"""Forms of text that several keys share."""

DOTTED_PATH = r"^[A-Za-z_][\w.]*[:.][A-Za-z_]\w*$"
"""`package.module:name` or `package.module.name`."""
