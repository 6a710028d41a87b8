"""The stages of the algorithm, in the order of the paper."""
