"""Moving request state between pods: planes, sessions, grants, digests."""
