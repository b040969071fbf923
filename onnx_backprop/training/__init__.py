"""The Trainer and what a training leaves behind: checkpoints, history, profile, report."""
