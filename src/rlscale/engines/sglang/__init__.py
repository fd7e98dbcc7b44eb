"""Programs for the interpreter that has SGLang but not rlscale: each file imports no other and runs by its path.

This folder is then first in `sys.path` of the server's children, so no file in it may have the name of another module.
"""
