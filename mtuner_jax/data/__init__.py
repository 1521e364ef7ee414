"""From JSONL lines to the batches of optimizer steps.

In the order data flows: `jsonl` (bytes to objects), `formats` (objects to
examples), `templates` and `rendering` (examples to tokens and loss mask),
`ingestion` (all of it, counted, into `samples`), `packing` (samples to rows),
`batches` (rows to arrays), `pipelines` (order, epochs, resume), `loading` (a run's
configuration to its data).
"""
