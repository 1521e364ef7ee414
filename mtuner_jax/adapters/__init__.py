"""Low-rank adapters: which linears they sit on, their scaling, their state."""
