"""What every tensor class of lowbit shares: torch's protocols, collectives, FSDP2, indexing, pickles, state dicts."""
