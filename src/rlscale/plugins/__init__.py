"""User functions in slime's form: `args` and `sample` with their names, and adapters to the protocols of rlscale.

    user function ── is_document_form ──> native: called as it is
                                     └──> slime's form: an adapter builds `args` and `sample` for each call

Neither torch nor Ray is imported here: the adapters run in child processes too.
"""
