"""Rehearsal: runs an experiment on a CPU in its own layout, with a tiny random model of the same family.

rehearsal          Rehearsal: the order of all steps
first_checks       checks of the uncut run before anything is started
cut_layout         parallel sizes, nodes and engines of a run, cut to at most 32 processes
rank_layout        ranks of every process group, and the weights each rank holds, without processes
layout_check       checks the uncut layout by these: groups, engines, transfer plan
tiny_family        config.json of a tiny model of the same family
generated_files    tokenizer, checkpoint and data sets that stand in for missing ones
rehearsal_config   overrides that turn the experiment into its rehearsal
engine_file        the file of sglang.config with the cut engines
rehearsal_launch   records the real launch of an engine process and starts a server without GPUs; fake_server is one
launch_record      launch of every engine process of the uncut run, as a file
rehearsal_reward   the reward of the run plus chance
coverage           parts that were rehearsed, and those that were not
rehearsal_report   the report as text and as files; memory_sampler measures for it
"""
