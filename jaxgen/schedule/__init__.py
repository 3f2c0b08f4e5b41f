"""What goes into the next step: requests, verdicts and the SplitFuse plan; pure host logic."""
