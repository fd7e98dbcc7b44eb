"""The models of one trainer rank, one module for each part they play."""
