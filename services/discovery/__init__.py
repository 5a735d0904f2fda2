"""Which pods there are: one registry, kept true by flags, a file or the Kubernetes API."""
