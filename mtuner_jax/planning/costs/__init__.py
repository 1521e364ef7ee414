"""What a plan takes: bytes and seconds, from sizes alone."""
