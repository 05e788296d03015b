"""What runs between the linears of one new token of each sequence: attention over a cache, norms, gates, a choice."""
