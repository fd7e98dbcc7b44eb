"""Agents that learn on two cores, with tools or in an environment. Experiments of `conf/experiment` name them."""
