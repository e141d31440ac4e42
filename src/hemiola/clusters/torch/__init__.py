"""One process a worker, collectives of torch.distributed in place of a server."""
