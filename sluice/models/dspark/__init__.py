"""DSPARK: a draft that reads the target's hidden states and proposes a block at once."""
