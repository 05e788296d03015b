"""Files on disk: written whole or not at all, and verified by digests."""
