"""The memory that holds request state; each pool declares its components."""
