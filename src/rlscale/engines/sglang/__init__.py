"""Programs for SGLang's own interpreter, which knows nothing of rlscale: each file stands alone and is run by its path.

This folder is then first on the path of the server's children, so no file in it may have the name of another module.
"""
