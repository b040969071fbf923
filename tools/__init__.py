"""What makes a release; nothing that is installed."""
