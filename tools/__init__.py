"""Scripts that make the small models which ship with Sluice; never imported by the library."""
