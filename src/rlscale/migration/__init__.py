"""Translates configurations of slime, verl and TRL to experiments of rlscale.

Readers (`shell_*`, `launch_commands`, ...) make a `Reading`: the arguments with their places in the input. It becomes a
`TranslationDraft`: keys and findings, by the tables in `tables/` and the rules in `from_<project>`; and that a
`Migration`: experiment file and report.
"""
