"""How changes of the weights travel: precision, error feedback, the mean over a group."""
