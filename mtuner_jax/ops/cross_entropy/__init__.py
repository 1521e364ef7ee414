"""Next-token cross-entropy; `api` dispatches, each back end is one file."""
