"""Classes of reward models that replace SGLang's of the same name.

SGLang imports this package where `SGLANG_EXTERNAL_MODEL_PACKAGE` names it: it is found because the folder of `serve.py`
is first in `sys.path` of the server's processes.
"""
