"""Where stints run: in one process under a virtual clock, over torch.distributed, or as Ray actors."""
