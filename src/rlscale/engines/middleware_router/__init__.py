"""The router of rlscale: one process in front of the engines, which runs middlewares of users."""
