"""Where bytes live: local files, URLs, slots, peers, live tensors."""
